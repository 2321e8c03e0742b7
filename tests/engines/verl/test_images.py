"""A model that takes images, in the rollout, the trainer and the export: what it says of an image is what it sees."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.config.run import TrainerConfig
from dataflow.data.pictures import Shown
from dataflow.engines.base import Sampling
from dataflow.engines.hf import HfRollout
from dataflow.engines.pretrained import undrawn
from dataflow.engines.verl.trainer import VerlTrainer
from dataflow.errors import DataError, ModelError
from dataflow.models.directory import check_model, check_weights
from dataflow.models.processor import Processor
from dataflow.models.tiny_vision import write_tiny_vision
from tests.engines.images import ROWS, R, by_transformers, picture, row, source
from tests.rigs.ranks import RankHost, free_ports

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vision(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def responses(engine: HfRollout, prompts: Batch) -> Batch:
    async def draw() -> list[Any]:
        return [sample async for sample in engine.generate(prompts, Sampling(n=2, max_tokens=R), seed=1)]

    return engine.batch(prompts, asyncio.run(draw()), R)


@pytest.fixture(scope="module")
def trainer(model: Path) -> Iterator[VerlTrainer]:
    before = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_ports(1)[0])
    # One row in a micro-batch: some micro-batches show nothing.
    made = VerlTrainer(str(model), TrainerConfig(micro_batch_size=1, lr=1e-3), AlgorithmConfig(), 10, R)
    yield made
    made.close()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def test_a_prompt_has_a_token_for_each_patch_and_verls_parts(model: Path) -> None:
    check_model(model)
    check_weights(model)
    batch = source(model).all()
    image = AutoConfig.from_pretrained(model).image_token_id
    assert [ids.count(image) for ids in batch["prompt_ids"]] == [4, 12, 0, 0]
    assert [part["type"] for part in batch["raw_prompt"][0][0]["content"]] == ["image", "text"]
    assert batch["raw_prompt"][0][0]["content"][0]["image"].size == (60, 60)
    assert batch["raw_prompt"][2] == ROWS[2]["prompt"]
    assert [tuple(shown.positions.shape) for shown in batch["multi_modal_inputs"]] == [
        (3, len(ids)) for ids in batch["prompt_ids"]
    ]


def test_rollout_and_trainer_agree_with_transformers_and_depend_on_the_image(
    model: Path, trainer: VerlTrainer, tmp_path: Path
) -> None:
    engine = HfRollout(str(model), 64)
    batch = responses(engine, source(model).all())
    assert batch["position_ids"].shape == (8, 4, batch["input_ids"].shape[1])
    assert not torch.isin(batch["responses"], torch.tensor(undrawn(engine.model.config))).any()
    wanted = by_transformers(model, batch)
    assert torch.allclose(batch["rollout_log_probs"], wanted, atol=1e-4)
    old = trainer.old_log_probs(batch)
    assert torch.allclose(old["old_log_probs"], wanted, atol=1e-4)

    shown = list(batch["multi_modal_inputs"])
    other = Shown({**shown[0].inputs, "pixel_values": -shown[0].inputs["pixel_values"]}, shown[0].positions)
    changed = batch.merge(batch.like(multi_modal_inputs=[other, *shown[1:]]))
    apart = (trainer.old_log_probs(changed)["old_log_probs"] - wanted).abs().amax(dim=1)
    assert apart[0] > 1e-3
    assert apart[1:].max() < 1e-4

    advantages = torch.linspace(-1, 1, 8)[:, None].expand(-1, R)
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    trainer.update(batch.merge(old, batch.like(advantages=advantages)), last=True)
    after = trainer.weights()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert any(name.startswith("model.visual") for name in moved)
    assert any(name.startswith("model.language_model") for name in moved)

    asyncio.run(engine.sync(after, 1))
    trainer.export(str(tmp_path / "export"), "card")
    again = responses(engine, source(tmp_path / "export").all())  # with the processor that the export has
    assert torch.allclose(again["rollout_log_probs"], by_transformers(tmp_path / "export", again), atol=1e-4)
    assert torch.allclose(again["rollout_log_probs"], trainer.old_log_probs(again)["old_log_probs"], atol=1e-4)


def stepped(model: Path, batch: Batch) -> dict[str, Any]:
    """Returns the log-probs before and after a step on a batch, and the digest of the weights."""
    trainer = VerlTrainer(str(model), TrainerConfig(micro_batch_size=1, lr=1e-3), AlgorithmConfig(), 10, R)
    old = trainer.old_log_probs(batch)
    advantages = torch.linspace(-1, 1, len(batch))[:, None].expand(-1, R)
    trainer.update(batch.merge(old, batch.like(advantages=advantages)), last=True)
    after = trainer.old_log_probs(batch)["old_log_probs"]
    found = {"before": old["old_log_probs"], "after": after, "digest": trainer.digest()}
    trainer.close()
    return found


def be_a_rank(out: str, port: str, _job: str, path: str) -> None:
    os.environ["MASTER_PORT"] = port
    batch = torch.load(Path(path) / "batch.pt", weights_only=False)
    torch.save([stepped(Path(path) / "model", batch)], out)


@pytest.mark.usefixtures("trainer")  # this process is a rank of its own
def test_each_rank_gets_the_pixels_of_its_rows(ranks: RankHost, model: Path, tmp_path: Path) -> None:
    engine = HfRollout(str(model), 64)
    batch = responses(engine, source(model).all())
    expected = by_transformers(model, batch)
    (tmp_path / "model").symlink_to(model)
    torch.save(batch, tmp_path / "batch.pt")
    one, two = stepped(model, batch), ranks.run(__name__, [("train", tmp_path)], 2, tmp_path)
    assert two[0][0]["digest"] == two[1][0]["digest"] != one["digest"]
    for (rank,) in two:
        assert torch.allclose(rank["before"], expected, atol=1e-4)
        assert torch.allclose(rank["after"], one["after"], atol=1e-3)
    assert not torch.allclose(one["after"], expected, atol=1e-2), "the step is no small one"


def test_rows_of_equal_length_are_scored_as_others_are(model: Path, trainer: VerlTrainer) -> None:
    engine = HfRollout(str(model), 64)
    asyncio.run(engine.sync(trainer.weights(), 1))
    batch = responses(engine, source(model, ROWS[:1]).all())
    assert batch["attention_mask"].all()
    old = trainer.old_log_probs(batch)["old_log_probs"]
    assert torch.allclose(old, batch["rollout_log_probs"], atol=1e-4)


def test_another_picture_in_the_same_file_is_other_data(model: Path, tmp_path: Path) -> None:
    found = []
    for red in (10, 10, 200):
        (tmp_path / "a.png").write_bytes(picture(red, 60)["bytes"])
        content, tokens = source(model, [row("<image> What is it?", {"path": str(tmp_path / "a.png")})]).digests()
        found.append((content, tokens))
    assert found[0] == found[1]
    assert (found[2][0] != found[1][0], found[2][1] == found[1][1]) == (True, True)


def test_what_the_model_cannot_be_shown_is_one_sentence(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data, row 1: the prompt has images, which the model does not take"):
        source(model, sees=False)
    with pytest.raises(DataError, match="data, row 2: image 1 cannot be read"):
        source(model, [ROWS[2], row("<image>", {"bytes": b"x"})])
    with pytest.raises(DataError, match=r"data, row 2: the prompt has \d+ tokens, more than data.max_prompt_length=26"):
        source(model, ROWS[:2], max_prompt_length=26)
    with pytest.raises(DataError, match=r"data, row 2: .* tokens.* as an image cannot be cut"):
        source(model, ROWS[:2], max_prompt_length=26, truncation="left")
    assert len(source(model, ROWS[:2], max_prompt_length=26, filter_overlong_prompts=True)) == 1
    bare = write_tiny_vision(tmp_path / "bare")
    (bare / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="no processor of images with a chat template can be loaded"):
        Processor(str(bare))
