"""Check which parts of this machine llorch can use, and which are broken, each with a repair.

The import of an optional package may crash or hang, so packages are imported in child processes. The order to read:

    packages     required packages and extras, and their imports in child processes
    checks       processor, BLAS, memory, torch, C kernels, reference engines, caches; one forward pass
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from llorch.apps.doctor.health import HealthCheck
from llorch.apps.doctor.machine.packages import check_packages, probe_imports


def examine(report: Callable[[str], None] = lambda line: None) -> Iterator[HealthCheck]:
    """Run all checks; `report` gets the name of each slow group before its checks."""
    report("packages")
    with ThreadPoolExecutor(2) as pool:
        errors = probe_imports(pool)
    checks = list(check_packages(errors))
    yield from checks
    if any(check.area == "packages" and check.state == "broken" for check in checks):
        yield HealthCheck("machine", "all else", "absent", "not checked, because the check needs these packages")
        return
    from llorch.apps.doctor.machine.checks import (
        check_caches,
        check_engines,
        check_hardware,
        check_kernels,
        check_torch,
        self_test,
    )

    yield from check_hardware()
    report("torch and compiled kernels")
    yield from check_torch()
    yield from check_kernels()
    yield from check_engines(errors)
    report("caches")
    yield from check_caches()
    report("one forward pass")
    yield self_test()
