from pathlib import Path

import numpy as np
import pytest

from llorch.builtin import BUILTIN, builtin_path, goldens_folder
from llorch.evidence import FAR_POSITION, PRODUCERS, cases_for, read, save, sha256
from llorch.weights import open_weights


@pytest.mark.parametrize("name", BUILTIN)
def test_stored_inputs_can_show_mistakes(name: str):
    golden = read(goldens_folder() / name)
    config = open_weights(builtin_path(name)).config
    assert golden.provenance["weights_sha256"] == sha256(builtin_path(name))
    near, far = golden.cases["near"], golden.cases["far"]
    assert len(set(near.ids)) >= 8
    assert near.first_position == 0
    assert len(far.ids) >= 8
    assert far.first_position == min(FAR_POSITION, config.max_position_embeddings - len(far.ids))
    assert config.n_layers >= 2
    assert 1 < config.n_kv_heads < config.n_heads


@pytest.mark.parametrize("name", BUILTIN)
def test_greedy_goldens_of_both_producers_are_the_same_text(name: str):
    evidence = read(goldens_folder() / name).evidence
    np.testing.assert_array_equal(evidence["llamacpp"].greedy, evidence["transformers"].greedy)


def test_all_goldens_and_models_stay_small():
    goldens = sum(f.stat().st_size for name in BUILTIN for f in (goldens_folder() / name).iterdir())
    models = sum(builtin_path(name).stat().st_size for name in BUILTIN)
    assert goldens < 20e6
    assert models < 15e6


def test_saving_twice_gives_the_same_bytes_and_reading_gives_the_same_arrays(tmp_path: Path):
    golden = read(goldens_folder() / "micro-llama")
    for folder in ("one", "two"):
        save(tmp_path / folder, golden)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()
        assert file.read_bytes() == (goldens_folder() / "micro-llama" / file.name).read_bytes()
    again = read(tmp_path / "one")
    assert again.tolerances == golden.tolerances
    assert again.cases == golden.cases
    for producer in PRODUCERS:
        for key, array in golden.evidence[producer].arrays().items():
            np.testing.assert_array_equal(again.evidence[producer].arrays()[key], array)


@pytest.mark.parametrize("missing", ["golden.json", "llamacpp.safetensors", "transformers.safetensors"])
def test_a_missing_golden_is_an_error_that_names_the_command(tmp_path: Path, missing: str):
    save(tmp_path, read(goldens_folder() / "micro-llama"))
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{missing} is missing; make it with reference_outputs/regenerate"):
        read(tmp_path)


def test_far_positions_stay_inside_a_short_context():
    config = open_weights(builtin_path("story")).config
    far = cases_for(range(12), config)["far"]
    assert far.positions[-1] < config.max_position_embeddings
