"""Find the parts of this machine that llorch can use and those that are broken, each with a repair.

An optional package may end the process that imports it, or never come back from it; so each is imported in a process
beside this one. In the order to read:

    packages     which packages are needed and which bring more; do they import, in a process beside us
    checks       processor, BLAS, memory, torch, C kernels, reference engines, caches; one forward pass
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from llorch.apps.doctor.health import HealthCheck
from llorch.apps.doctor.machine.packages import imported, of_packages


def examine(report: Callable[[str], None] = lambda line: None) -> Iterator[HealthCheck]:
    """Look at everything; `report` is told what is being looked at."""
    report("packages")
    with ThreadPoolExecutor(2) as pool:
        probed = imported(pool)
    found = list(of_packages(probed))
    yield from found
    if any(one.area == "packages" and one.state == "broken" for one in found):
        yield HealthCheck("machine", "all else", "absent", "not checked, because the check needs these packages")
        return
    from llorch.apps.doctor.machine.checks import check_engines, of_caches, of_hardware, of_torch, self_test

    yield from of_hardware()
    report("torch and compiled kernels")
    yield from of_torch()
    yield from check_engines(probed)
    report("caches")
    yield from of_caches()
    report("one forward pass")
    yield self_test()
