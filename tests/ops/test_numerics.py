import pytest
from helpers.refusals import refuses

from llorch.ops.numerics import EXACT, GGML, GGML_KERNELS, Numerics, ProductKernels


@pytest.mark.parametrize("name", ["exact", "scheme"])
def test_ggml_s_kernels_are_refused_where_inputs_are_not_rounded_as_ggml_does(name):
    with refuses(ValueError, "expected ggml numerics", name):
        Numerics(name, kernels="ggml")


@pytest.mark.parametrize("kernels", ["own", "ggml"])
def test_the_form_names_the_cache_and_the_kernels(kernels: ProductKernels):
    assert (GGML_KERNELS.name, GGML_KERNELS.kv_cache) == (GGML.name, GGML.kv_cache)
    assert (str(EXACT), str(GGML), str(GGML_KERNELS)) == ("exact", "ggml", "ggml by ggml's kernels")
    assert str(Numerics("ggml", "f16", kernels)).startswith("ggml with a f16 cache")
