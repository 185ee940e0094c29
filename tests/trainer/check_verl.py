"""RoC with verl's own classes and a real transfer queue; run by `scripts/setup-trainer --verl`."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
from byte_tokenizer import byte_tokenizer
from omegaconf import OmegaConf
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, _agent_loop_registry
from verl.protocol import DataProto
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, get_trainer_cls
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from rollyard import AsyncClient
from rollyard_trainer import parse, template
from rollyard_trainer.adapters.verl import RocTrainerSync, RollyardAgentLoop
from rollyard_trainer.engines.hf import HFTokenizer
from rollyard_trainer.objective import advantages

pytestmark = pytest.mark.filterwarnings("default")  # the framework's own
SOURCE = byte_tokenizer()
TOKENS = HFTokenizer(SOURCE)


class Served:
    """verl's client of its inference servers, of a policy that is written here."""

    def __init__(self, turns: list[str]) -> None:
        self.turns, self.seen = turns, list[dict[str, Any]]()

    async def generate(self, **request: Any) -> TokenOutput:
        self.seen.append(request)
        ids = TOKENS.encode(self.turns[len(self.seen) - 1])
        extra = {"min_global_steps": 3, "max_global_steps": 3}
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields=extra)


def call(code: str) -> str:
    body = json.dumps({"name": parse.TOOL_NAME, "arguments": {"code": code}})
    return f"</reason>\n<tool_call>\n{body}\n</tool_call>{template.END}"


async def rollout(turns: list[str], room: int = 2000) -> tuple[Any, Served]:
    rollout = {"prompt_length": 4000, "response_length": room,
               "multi_turn": {"max_assistant_turns": 2}}  # fmt: skip
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    served = Served(turns)
    loop = RollyardAgentLoop(
        trainer_config=DictConfigWrap(config), server_manager=served, tokenizer=SOURCE,
        processor=None, dataset_cls=RLHFDataset, data_config=DictConfigWrap(config.data),
    )  # fmt: skip
    row = {"raw_prompt": [{"role": "user", "content": "6 times 7"}],
           "reward_model": {"ground_truth": "42"}}  # fmt: skip
    return await loop.run({"temperature": 1.0}, **row), served


@pytest.fixture
async def service(address: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    async with AsyncClient(address) as client:
        monkeypatch.setattr(RollyardAgentLoop, "_client", client)
        yield


async def test_an_agent_loop_is_token_for_token_what_was_written_and_given(service: None) -> None:
    answer = f"</reason>\n<answer>\\boxed{{42}}</answer>{template.END}"
    output, served = await rollout([call("print(6*7)"), answer])
    assert SOURCE.decode(output.prompt_ids) == template.prompt("6 times 7")
    given = template.tool_turn(["42"])
    text = call("print(6*7)") + given + answer
    assert SOURCE.decode(output.response_ids) == text
    own = [i for i, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
    assert SOURCE.decode(own) == call("print(6*7)") + answer
    assert len(output.response_logprobs) == len(output.response_ids)
    assert output.reward_score == 1.0
    assert output.extra_fields["roc"]["statuses"] == ["ok"]
    assert output.extra_fields["min_global_steps"] == 3
    first, second = served.seen
    assert first["request_id"] == second["request_id"]
    assert second["prompt_ids"][: len(first["prompt_ids"])] == first["prompt_ids"]
    assert second["sampling_params"]["stop_token_ids"] == [TOKENS.end_id]
    assert output.as_dict()["rm_scores"].sum() == 1.0


async def test_rollouts_end_at_turns_and_room_and_say_when_the_service_failed(
    service: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, served = await rollout([call("1/0")] * 3)
    assert (output.num_turns, len(served.seen), output.reward_score) == (4, 2, 0.0)
    assert output.extra_fields["roc"] == {
        "reward": 0.0, "turns": 2, "answers": 0, "statuses": ["exec_error"] * 2,
    }  # fmt: skip
    output, _ = await rollout([call("print(1)")], room=40)
    assert len(output.response_ids) == 40
    assert output.extra_fields["roc"]["statuses"] == []
    async with AsyncClient("http://127.0.0.1:9", max_retries=0) as gone:
        monkeypatch.setattr(RollyardAgentLoop, "_client", gone)
        output, _ = await rollout([call("print(1)")])
    assert output.extra_fields["roc"]["reward"] is None


@pytest.fixture(scope="module")
def queue() -> Iterator[None]:
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False,
             object_store_memory=100_000_000, _node_ip_address="127.0.0.1")  # fmt: skip
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()
    ray.shutdown()


def put(rewards: dict[str, list[float | None]]) -> Any:
    keys = [f"{uid}_{n}_0" for uid, group in rewards.items() for n in range(len(group))]
    told = [
        {"roc": {"reward": one, "turns": 2, "answers": 1, "statuses": ["ok"]}}
        for group in rewards.values()
        for one in group
    ]
    uids = [uid for uid, group in rewards.items() for _ in group]
    fields = TensorDict(
        {"uid": NonTensorStack(*uids), "extra_fields": NonTensorStack(*told)},
        batch_size=[len(keys)],
    )
    tags = [{"seq_len": 8, "row": row} for row in range(len(keys))]
    batch = tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=tags)
    batch.tags, batch.extra_info = tags, {"temperature": 1.0}
    return batch


def test_the_trainer_balances_only_what_was_selected(
    queue: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert get_trainer_cls("roc_sync") is RocTrainerSync
    assert "rollyard" in _agent_loop_registry
    given: list[Any] = []

    def balance(self: PPOTrainer, batch: Any, metrics: dict, **_: Any) -> Any:
        given.append(batch)
        return batch

    monkeypatch.setattr(PPOTrainer, "_balance_batch", balance)  # needs the GPU workers
    trainer = RocTrainerSync.__new__(RocTrainerSync)
    trainer.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"n": 8}}})
    batch = put({
        "mixed": [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0], "easy": [1.0] * 8,
        "faulty": [None, None, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0],
    })  # fmt: skip
    metrics: dict[str, float] = {}
    kept = trainer._balance_batch(batch, metrics)
    assert given == [kept]
    assert metrics == {"roc/selected": 7, "roc/lost_infra": 2}
    uids = [key.rsplit("_", 2)[0] for key in kept.keys]
    assert (uids.count("mixed"), uids.count("faulty"), uids.count("easy")) == (4, 3, 0)
    assert kept.extra_info == {"temperature": 1.0}
    assert [batch.keys[tag["row"]] for tag in kept.tags] == kept.keys
    assert set(tq.kv_list("train")["train"]) == set(kept.keys)
    # verl's own advantages of these rows are equation 7, over what was selected.
    rewards = [1.0, 1.0, 0.0, 0.0]
    mixed = [key for key in kept.keys if key.startswith("mixed")]
    scores = torch.zeros(4, 3)
    scores[:, -1] = torch.tensor(rewards)
    data = DataProto.from_dict(
        {"token_level_rewards": scores, "response_mask": torch.ones(4, 3)},
        non_tensors={"uid": np.array(["mixed"] * 4, dtype=object)},
    )
    done = compute_advantage_for_multi_trajectories(data, batch_keys=mixed, adv_estimator="grpo")
    ours = torch.tensor(advantages(rewards), dtype=torch.float32)
    assert torch.allclose(done.batch["advantages"][:, 0], ours, atol=1e-4)
    tq.kv_clear(keys=kept.keys, partition_id="train")


def test_a_batch_without_any_signal_stays_whole(queue: None) -> None:
    from rollyard_trainer import roc
    from rollyard_trainer.adapters.verl import select

    batch = put({"easy": [1.0] * 4})
    metrics: dict[str, float] = {}
    kept = select(batch, 2, np.random.default_rng(0), roc.PAPER, metrics)
    assert kept.keys == batch.keys
    assert metrics["roc/selected"] == 0
    tq.kv_clear(keys=kept.keys, partition_id="train")
