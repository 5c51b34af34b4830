"""An adapter from one file format into the other, or into a PEFT directory that simpler readers understand."""

import errno
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from llorch.config import ModelConfig
from llorch.files import open_weights
from llorch.files.new_file import new_folder
from llorch.lora.adapter import Adapter
from llorch.lora.base import BaseIdentity, identity_of
from llorch.lora.files import check_base, read_adapter, recorded_base
from llorch.lora.gguf_format import common_alpha, write_lora_gguf
from llorch.lora.peft_config import CONFIG_FILE
from llorch.lora.peft_format import BASE_FILE, TENSOR_FILE, write_peft
from llorch.lora.plain import plain_adapter
from llorch.write_checks import size_of


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was done."""

    target: Path
    n_parameters: int
    n_bytes: int
    notes: list[str]


def export(
    base: str | Path,
    adapter: str | Path,
    target: str | Path,
    *,
    vllm_safe: bool = False,
    force: bool = False,
    any_base: bool = False,
) -> Export:
    """Write an adapter anew: as LoRA GGUF where the target ends in .gguf, else as PEFT directory.

    `vllm_safe` writes one rank and one alpha, all scales multiplied into B. Refused: BaseMismatch (unless `any_base`),
    what the target cannot express, a target that exists (FileExistsError, unless `force`) or holds a source
    (ValueError). After an error nothing is left of the target.
    """
    base, adapter, target = Path(base), Path(adapter), Path(target)
    _check_target(target, (base, adapter), force=force)
    with closing((weights := open_weights(base)).source):
        notes = [check_base(adapter, weights, any_base=any_base)]
        read = read_adapter(adapter, weights.config)
        recorded = recorded_base(adapter)
        identity = recorded if isinstance(recorded, BaseIdentity) else identity_of(weights)
    if vllm_safe:
        read = plain_adapter(read, weights.config)
    _write(read, target, weights.config, identity)
    read_adapter(target, weights.config)
    if target.suffix == ".gguf" and common_alpha(read) is None:
        notes.append("scales differ from matrix to matrix: each is multiplied into its B, and alpha is left out")
    return Export(target=target, n_parameters=read.n_parameters, n_bytes=size_of(target), notes=notes)


def _write(adapter: Adapter, target: Path, model: ModelConfig, base: BaseIdentity) -> None:
    if target.suffix == ".gguf":
        write_lora_gguf(adapter, target, model, base=base)
        return
    with new_folder(target) as folder:
        write_peft(adapter, folder, base=base)


def _check_target(target: Path, sources: tuple[Path, ...], *, force: bool) -> None:
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target}: the folder {target.parent} does not exist; make it first")
    if not target.exists():
        return
    for source in (path for path in sources if path.exists()):
        if source.samefile(target) or target.resolve() in source.resolve().parents:
            raise ValueError(f"{target}: the target would replace {source}; choose another name")
    if not force:
        raise FileExistsError(errno.EEXIST, "exists; choose another name, or replace it with --force", str(target))
    if target.is_dir() == (target.suffix == ".gguf"):
        kind = "a folder" if target.is_dir() else "a file"
        raise FileExistsError(errno.EEXIST, f"is {kind}, which is not replaced; choose another name", str(target))
    ours = {CONFIG_FILE, TENSOR_FILE, BASE_FILE}
    foreign = sorted(file.name for file in target.iterdir() if file.name not in ours) if target.is_dir() else []
    if foreign:
        message = f"holds {foreign[0]}, which is no file of an adapter; it is not replaced, choose another name"
        raise FileExistsError(errno.EEXIST, message, str(target))
