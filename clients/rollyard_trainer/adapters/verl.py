"""verl's agent loop and synchronous trainer with GRPO-RoC, for verl 0.9.1 and its V1 trainer.

    actor_rollout_ref.rollout.agent.default_agent_loop=rollyard
    actor_rollout_ref.rollout.n=32                  # 2G
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=10
    actor_rollout_ref.actor.ppo_mini_batch_size=…   # in prompts of n; half of train_batch_size
    algorithm.adv_estimator=grpo  algorithm.use_kl_in_reward=false
    trainer.v1.trainer_mode=roc_sync

with this module imported in the driver and the workers (``VERL_USE_EXTERNAL_MODULES``). Rows of
the data set have ``reward_model.ground_truth``, as verl's own. The service and its key come from
``ROLLYARD_URL`` and ``ROLLYARD_API_KEY``.

The loop writes what the selection needs into ``extra_fields["roc"]``; the trainer drops the rows
that were not selected before it balances the batch, so nothing is computed for them.
"""

# pyright: basic, reportMissingImports=false

from collections import defaultdict
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from rollyard import AsyncClient, Limits
from rollyard_trainer import roc, template, verify
from rollyard_trainer.adapters import group
from rollyard_trainer.engines.hf import HFTokenizer
from rollyard_trainer.env import PythonToolEnv, service
from rollyard_trainer.trajectory import Trajectory

_TURNS = 10  # of the paper's stages 1 and 2, where verl's configuration says nothing


@register("rollyard")
class RollyardAgentLoop(AgentLoopBase):
    """One rollout in the paper's template, token in and token out, calls run by the service.

    verl makes one of these per rollout, so what is costly is shared by a process. Subclass to set
    ``limits``.
    """

    limits: ClassVar[Limits] = Limits()
    _client: ClassVar[AsyncClient | None] = None
    _tokenizers: ClassVar[dict[int, HFTokenizer]] = {}

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Write a rollout and score it; a row is one of verl's RLHFDataset."""
        cls = type(self)
        if cls._client is None:
            cls._client = AsyncClient(job="verl")
        run = service(cls._client, limits=self.limits, job="verl")
        tokens = cls._tokenizers.setdefault(id(self.tokenizer), HFTokenizer(self.tokenizer))
        prompt = template.prompt(str(row["raw_prompt"][-1]["content"]))
        one = Trajectory(tokens.encode(prompt))
        extra = await self._write(one, tokens, PythonToolEnv(run=run), sampling_params)
        if one.stop != "infra":
            gold = str(row["reward_model"]["ground_truth"])
            one.reward = verify.reward(await verify.check(one.own_text, gold, run))
        return AgentLoopOutput(
            prompt_ids=one.prompt_ids,
            response_ids=one.ids,
            response_mask=[int(own) for own in one.mask],
            response_logprobs=one.logprobs,
            reward_score=one.reward or 0.0,  # None leaves its group: it is in "roc"
            num_turns=2 * one.turns,
            metrics={},  # pyright: ignore[reportArgumentType] - pydantic makes its type of it
            extra_fields={**extra, "roc": facts(one), "turn_scores": [], "tool_rewards": []},
        )

    async def _write(
        self, one: Trajectory, tokens: HFTokenizer, env: PythonToolEnv, params: dict[str, Any]
    ) -> dict[str, Any]:
        """Fill the rollout turn by turn; returns what verl's server said of the last one."""
        room = int(self.rollout_config.response_length)
        turns = int(self.rollout_config.multi_turn.get("max_assistant_turns") or _TURNS)
        params = {**params, "stop_token_ids": [tokens.end_id]}
        request_id = uuid4().hex  # the same for all turns: it stays on its server
        while True:
            output = await self.server_manager.generate(
                request_id=request_id, prompt_ids=one.prompt_ids + one.ids, sampling_params=params
            )
            ids = list(output.token_ids)[: room - len(one.ids)]
            scores = list(output.log_probs or [0.0] * len(ids))[: len(ids)]
            text = tokens.decode(ids)
            one.wrote(ids, scores, text)
            full = len(one.ids) >= room and ids[-1:] != [tokens.end_id]
            calls = [] if full else await env.answer(text)
            one.calls += calls
            given = template.tool_turn([call.observation for call in calls])
            more = tokens.encode(given)
            if any(call.status == "infra_error" for call in calls):
                one.stop = "infra"
            elif full or (calls and len(one.ids) + len(more) >= room):
                one.stop = "length"
            elif not calls:
                one.stop = "answer"
            elif one.turns >= turns:
                one.stop = "turns"
            if one.stop is not None:
                return dict(output.extra_fields)
            one.read(more, given)


def facts(one: Trajectory) -> dict[str, Any]:
    """What the selection needs to know, as plain data; a reward of None: leave it out."""
    return {
        "reward": None if one.is_infra else one.reward,
        "turns": one.turns,
        "answers": one.answers,
        "statuses": [call.status for call in one.calls],
    }


def sample(told: dict[str, Any]) -> roc.Sample | None:
    """The rollout of :func:`facts`; None when the service or the verifier failed it."""
    if told["reward"] is None:
        return None
    calls = tuple(roc.ToolCall(status) for status in told["statuses"])
    return roc.Sample(told["reward"], "", told["turns"], told["answers"], calls)


@register_trainer("roc_sync")
class RocTrainerSync(PPOTrainerSync):
    """verl's synchronous trainer, which drops what RoC did not select as soon as it is scored."""

    rule: ClassVar[roc.Rule] = roc.PAPER
    _rng = np.random.default_rng(0)

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, *rest: Any, **named: Any) -> Any:
        keep = self.config.actor_rollout_ref.rollout.n // 2
        chosen = select(batch, keep, self._rng, self.rule, metrics)
        return super()._balance_batch(chosen, metrics, *rest, **named)


def select(
    batch: KVBatchMeta, keep: int, rng: np.random.Generator, rule: roc.Rule, metrics: dict
) -> KVBatchMeta:
    """The selected rows of a batch in the transfer queue, from which the others are removed.

    When no group has any signal, all stay: their advantages are zero, and verl takes no empty
    batch.
    """
    data = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["uid", "extra_fields"]
    )
    groups: dict[str, list[int]] = defaultdict(list)
    for row, uid in enumerate(data["uid"]):
        groups[str(uid)].append(row)
    told = [sample(extra["roc"]) for extra in data["extra_fields"]]
    rows: list[int] = []
    for members in groups.values():
        found = group.select([told[row] for row in members], keep, rng, rule)
        rows += [members[index] for index in found]
    metrics["roc/selected"] = len(rows)
    metrics["roc/lost_infra"] = sum(one is None for one in told)
    if not rows:
        return batch
    dropped = [key for row, key in enumerate(batch.keys) if row not in set(rows)]
    tq.kv_clear(keys=dropped, partition_id=batch.partition_id)
    return KVBatchMeta(
        partition_id=batch.partition_id, keys=[batch.keys[row] for row in sorted(rows)],
        tags=[batch.tags[row] for row in sorted(rows)], extra_info=batch.extra_info,
    )  # fmt: skip
