"""Options of the verbs that run a model, and the model that they open."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from llorch.cli.options import PATH, SEED, JsonObject, WholeNumber, group, page_option

if TYPE_CHECKING:
    from llorch.files.residency import Residency
    from llorch.ops.numerics import Numerics
    from llorch.pytorch.device import Kernels

residency_option = page_option(
    "--weights", "residency", type=click.Choice(["auto", "decoded", "packed"]), default="auto", show_default=True,
    help="Form of matrices in memory.",
)  # fmt: skip


def _backend(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    """Return the backend; without --backend, torch if an option that only torch has is set."""
    on_torch = ctx.params["device"] or ctx.params["dtype"] or ctx.params["kernels"] in ("torch", "own")
    return value or ("torch" if on_torch else "numpy")


def numerics_group(default: str) -> Callable[[Callable], Callable]:
    """Add the options for arithmetic to a verb; `default` is the default of `--numerics` on the help page."""
    return group(
        "Numerics",
        page_option(
            "--numerics", type=click.Choice(["exact", "ggml", "scheme"]), metavar="KIND",
            help="exact; ggml: rounds inputs as llama.cpp does; scheme: as a quantised folder says.  "
            f"[default: {default}]",
        ),
        page_option(
            "--kv-cache", type=click.Choice(["f32", "f16"]), default="f32", show_default=True,
            help="Type of the KV cache, with ggml.",
        ),
        residency_option,
    )  # fmt: skip


def backend_group(dtypes: str) -> Callable[[Callable], Callable]:
    """Add the options of the forward pass and its device; `dtypes` is the default of `--dtype` on the help page."""
    numerics = group(
        "Numerics",
        page_option(
            "--dtype", type=click.Choice(["float32", "bfloat16", "float16", "float64"]), is_eager=True,
            help=f"Number type on torch.  [default: {dtypes}]",
        ),
        page_option(
            "--kernels", type=click.Choice(["auto", "torch", "own", "ggml"]), metavar="KIND", default="auto",
            is_eager=True, help="auto: the fastest that are right; torch or own; ggml: ggml's, on NumPy.",
        ),
    )  # fmt: skip
    machine = group(
        "Machine",
        page_option(
            "--backend", type=click.Choice(["numpy", "torch"]), callback=_backend,
            help="Forward pass.  [default: numpy; torch with --device, --dtype or --kernels torch|own]",
        ),
        page_option("--device", is_eager=True, help="Device: cpu, cuda or cuda:N.  [default: cpu]"),
    )  # fmt: skip
    return group("", numerics, machine)


numerics_options = numerics_group("exact")
backend_options = backend_group("float32")
model_options = group("", numerics_options, backend_options)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Values of `numerics_options` and `backend_options`.

    Numerics `ggml` rounds the inputs of quantised matrices as llama.cpp does, `scheme` as a quantised folder says.
    """

    numerics: str | None  # None: exact, or for verify the numerics that suit the file
    kv_cache: str  # its type, with ggml numerics
    residency: "Residency"  # form of quantised matrices in memory: decoded, packed or auto
    backend: str  # numpy, or torch, whose device, dtype and kernels follow
    device: str | None
    dtype: str | None
    kernels: "Kernels | Literal['ggml']"

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "ModelOptions":
        """Take the values of these options out of the parsed values of a command line."""
        return cls(**{field.name: values.pop(field.name) for field in fields(cls)})

    def arithmetic(self, *, compiled: bool = False) -> "Numerics":
        """Return the arithmetic; raise a usage error for options that the backend does not have."""
        from llorch.cli.inputs import chosen_numerics

        if self.backend == "numpy":
            set_options = {
                "--device": self.device, "--dtype": self.dtype, "--kernels torch": self.kernels == "torch",
                "--compile": compiled,
            }  # fmt: skip
            other_backend = "torch; the NumPy path runs on the CPU in float32"
        else:
            set_options = {
                f"--numerics {self.numerics}": self.numerics not in (None, "exact"),
                "--kv-cache f16": self.kv_cache == "f16",
                "--kernels ggml": self.kernels == "ggml",
            }
            other_backend = "numpy; the torch path always computes in exact numerics"
        for option, value in set_options.items():
            if value:
                raise click.UsageError(f"{option} goes with --backend {other_backend}")
        if self.kernels == "ggml" and self.residency == "decoded":
            raise click.UsageError("--kernels ggml multiplies packed matrices; leave out --weights decoded")
        return chosen_numerics(self.numerics, self.kv_cache, self.kernels)

    @property
    def torch_kernels(self) -> "Kernels":
        """The kernels, on torch, which has none of ggml."""
        assert self.kernels != "ggml"  # a usage error of every verb
        return self.kernels

    def open(
        self, path: Path, arithmetic: "Numerics", *, n_tokens: int, is_exact: bool = False, **only_torch: Any
    ) -> Any:
        """Open a model on the backend; `only_torch`: arguments of `load_torch`. On NumPy, print the form in memory.

        If no option selects the arithmetic on NumPy, choose the fastest, unless it must be exact (`is_exact`).
        """
        if self.backend == "torch":
            from llorch import load_torch  # its error names the extra to install if torch is absent

            return load_torch(
                path, device=self.device or "cpu", dtype=self.dtype or "float32", kernels=self.torch_kernels,
                residency=self.residency, n_tokens=n_tokens, **only_torch,
            )  # fmt: skip
        from llorch.cli.inputs import fastest_numerics, say_plan
        from llorch.files import open_weights
        from llorch.model.model import prepare

        weights = open_weights(path)
        if self.numerics is None and self.kernels == "auto" and self.residency != "decoded" and not is_exact:
            arithmetic = fastest_numerics(weights)
        loaded = prepare(weights.using(arithmetic), residency=self.residency, n_tokens=n_tokens)
        say_plan(loaded)
        return loaded


template_options = group(  # for `TemplateSettings`
    "Chat template",
    page_option(
        "--template-date", type=click.DateTime(["%Y-%m-%d"]), metavar="YYYY-MM-DD",
        help="Date in the template.  [default: today]",
    ),
    page_option(
        "--chat-template-kwargs", type=JsonObject(), help='Variables, as in \'{"enable_thinking": false}\'.'
    ),
)  # fmt: skip


sampling_options = group(  # names of `SamplingSettings`
    "Sampling",
    page_option("-t", "--temperature", default=0.0, show_default=True, help="Temperature; 0: best token."),
    page_option("--top-k", type=WholeNumber(), default=0, show_default=True, help="Number of tokens kept; 0: all."),
    page_option("--top-p", default=1.0, show_default=True, help="Probability mass kept."),
    page_option("--min-p", default=0.0, show_default=True, help="Least probability, as a share of the best token's."),
    page_option("--repetition-penalty", default=1.0, show_default=True, help="Penalty; 1: none."),
    page_option("--seed", type=SEED, default=0, show_default=True, help="Seed of the draws."),
)

adapter_options = (
    page_option("--adapter", type=PATH, help="LoRA adapter: PEFT directory or GGUF file."),
    page_option("--any-base", is_flag=True, help="Permission for an adapter of another base."),
)
