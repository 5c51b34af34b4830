"""Find the parts of this machine that llorch can use and those that are broken, each with a repair.

An optional package may end the process that imports it, or never come back from it; so each is imported in a process
beside this one. In the order to read:

    finding      what is found, and how it stands
    child        a process beside us, with a limit of time
    packages     which packages are needed and which bring more; do they import
    hardware     processor, BLAS, memory
    engines      torch and its devices, C kernels, reference engines
    caches       folders that grow, and the room beside them
    self_test    one forward pass against its golden
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from llorch.apps.doctor.machine.finding import HealthCheck
from llorch.apps.doctor.machine.packages import imported, of_packages

REPORT_VERSION = 1


def examine(report: Callable[[str], None] = lambda line: None) -> Iterator[HealthCheck]:
    """Look at everything; `report` is told what is being looked at."""
    report("packages")
    with ThreadPoolExecutor(2) as pool:
        probed = imported(pool)
    found = list(of_packages(probed))
    yield from found
    if any(one.part == "packages" and one.state == "broken" for one in found):
        yield HealthCheck("machine", "all else", "note", "not checked, because the check needs these packages")
        return
    from llorch.apps.doctor.machine.caches import of_caches
    from llorch.apps.doctor.machine.engines import check_engines, of_torch
    from llorch.apps.doctor.machine.hardware import of_hardware
    from llorch.apps.doctor.machine.self_test import self_test

    yield from of_hardware()
    report("torch and compiled kernels")
    yield from of_torch()
    yield from check_engines(probed)
    report("caches")
    yield from of_caches()
    report("one forward pass")
    yield self_test()
