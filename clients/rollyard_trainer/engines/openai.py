"""Rollouts from any server with OpenAI's interface: vLLM, SGLang, a vendor's.

``completions`` sends the conversation as rendered by :mod:`rollyard_trainer.template`; with a
tokenizer it sends token ids and asks for token ids and log-probabilities back (vLLM's
``return_token_ids``), so that nothing is ever tokenised anew: what training needs. ``chat`` sends
messages; the server's own template decides what the model reads: for evaluation only.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, Self

import httpx2

from rollyard_trainer import scheduler, template
from rollyard_trainer.engines import Sampling, Tokenizer
from rollyard_trainer.env import PythonToolEnv
from rollyard_trainer.trajectory import Trajectory

RETRIES, FIRST_WAIT_S = 5, 0.5
_RETRIED = {408, 429, 500, 502, 503, 504}


class ModelError(RuntimeError):
    """The model's server refused; the message has what it said."""


class ServerLost(ModelError):
    """It cannot be reached, or fails whatever it is asked, after all retries."""


class OpenAIEngine:
    """Writes rollouts; see :class:`rollyard_trainer.engines.Engine`.

    Args:
        base_url: Such as ``http://127.0.0.1:8000/v1``.
        model: The name that the server gives it.
        api: ``completions`` or ``chat``.
        api_key: Bearer key.
        tokenizer: Send and receive token ids (``completions`` only).
        concurrency: Requests under way at once.
        timeout_s: For one answer of the model.
        retries: Tries after the first; they wait 0.5 s, 1 s, 2 s, …
    """

    def __init__(
        self, base_url: str, model: str, *, api: Literal["completions", "chat"] = "completions",
        api_key: str | None = None, tokenizer: Tokenizer | None = None, concurrency: int = 64,
        timeout_s: float = 600.0, retries: int = RETRIES,
    ) -> None:  # fmt: skip
        if tokenizer is not None and api == "chat":
            raise ValueError("chat has no token ids: use completions")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx2.AsyncClient(base_url=base_url, headers=headers, timeout=timeout_s)
        self._model, self._api, self._tokenizer = model, api, tokenizer
        self._retries = retries
        self._slots = asyncio.Semaphore(concurrency)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def rollout(
        self, prompts: Sequence[str], env: PythonToolEnv, sampling: Sampling
    ) -> list[Trajectory]:
        """One rollout per prompt; each goes its own pace, its tool calls sent at once.

        Raises:
            ModelError: the model's server gave no answer.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.one(text, env, sampling)) for text in prompts]
        return [task.result() for task in tasks]

    async def one(self, prompt: str, env: PythonToolEnv, sampling: Sampling) -> Trajectory:
        """One rollout; its tool calls go out the moment that a turn ends.

        Raises:
            ModelError: the model's server gave no answer.
        """
        one = Trajectory(self._tokenizer.encode(prompt) if self._tokenizer else [])
        for turn in range(1, sampling.max_turns + 1):
            left = sampling.max_tokens - len(one.ids)
            if left <= 0:
                one.stop = "length"
                return one
            text, ended = await self._write(one, prompt, left, sampling)
            calls = await env.answer(text)
            one.calls += calls
            if any(call.status == "infra_error" for call in calls) and env.on_infra == "drop":
                one.stop = "infra"
            elif not ended:
                one.stop = "length"
            elif not calls:
                one.stop = "answer"
            elif turn == sampling.max_turns:
                one.stop = "turns"
            if one.stop is not None:
                return one
            answer = template.tool_turn([call.observation for call in calls])
            one.read(self._tokenizer.encode(answer) if self._tokenizer else [], answer)
        return one

    async def check(self) -> None:
        """Ask the server for its models, once.

        Raises:
            ServerLost: it gives no answer.
        """
        try:
            (await self._http.get("models")).raise_for_status()
        except httpx2.HTTPError as error:
            raise ServerLost(f"{self._http.base_url}models: {error}") from None

    async def kv_capacity(self) -> int:
        """KV cache of the server in tokens, from its metrics page, which is beside ``/v1``.

        Raises:
            ModelError: it has no such page, or the page does not say.
        """
        address = self._http.base_url.join("../metrics")
        try:
            response = await self._http.get(address)
            response.raise_for_status()
            return scheduler.kv_capacity(response.text)
        except (httpx2.HTTPError, ValueError) as error:
            raise ModelError(f"{address}: {error}") from None

    def tokens_of(self, prompt: str) -> int:
        """Tokens of a prompt; at most those, without a tokenizer: none is less than a byte."""
        return len(self._tokenizer.encode(prompt) if self._tokenizer else prompt.encode())

    async def _write(
        self, one: Trajectory, prompt: str, left: int, sampling: Sampling
    ) -> tuple[str, bool]:
        """Let the model write one turn; return it and whether it ended by itself."""
        body: dict[str, Any] = {
            "model": self._model, "max_tokens": left, "temperature": sampling.temperature,
        }  # fmt: skip
        if self._api == "chat":
            body["messages"] = _conversation(prompt, one.text)
            answer = await self._post("chat/completions", body)
            text: str = answer["choices"][0]["message"]["content"] or ""
        else:
            body |= {"prompt": prompt + one.text, "stop": [template.END]}
            if self._tokenizer is not None:
                body |= {"prompt": one.prompt_ids + one.ids, "return_token_ids": True}
                body |= {"logprobs": 0, "stop": [], "stop_token_ids": [self._tokenizer.end_id]}
            answer = await self._post("completions", body)
            text = answer["choices"][0]["text"]
        choice = answer["choices"][0]
        ended = choice["finish_reason"] != "length"
        written = int(answer.get("usage", {}).get("completion_tokens", 0))
        ids, scores = [-1] * written, [0.0] * written
        if self._tokenizer is not None:
            if "token_ids" not in choice:
                raise ModelError("the server returned no token_ids: training needs them (vLLM)")
            ids = [int(token) for token in choice["token_ids"]]
            scores = [float(score) for score in choice["logprobs"]["token_logprobs"]]
            text = self._tokenizer.decode(ids)
        elif ended and not text.endswith(template.END):
            text += template.END
        one.wrote(ids, scores, text)
        return text, ended

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        said = ""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
            try:
                async with self._slots:
                    response = await self._http.post(path, json=body)
            except httpx2.TransportError as error:
                said = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                return response.json()
            said = f"{response.status_code}: {response.text[:500]}"
            if response.status_code not in _RETRIED:
                raise ModelError(f"{self._http.base_url}{path} refused: {said}")
        raise ServerLost(f"no answer from {self._http.base_url}{path}: {said}")


def _conversation(prompt: str, text: str) -> list[dict[str, str]]:
    """The rendered conversation as messages: it was made of nothing else."""
    rendered = (prompt + text).removesuffix(template.END)
    parts = (part.partition("\n") for part in rendered.split("<|im_start|>") if part)
    found = [
        {"role": role, "content": content.strip().removesuffix(template.END)}
        for role, _, content in parts
    ]
    return found if found[-1]["role"] == "user" else found[:-1]
