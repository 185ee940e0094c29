"""Compare one observed answer with the `expect` part of a case.

Only the pure comparison lives here; how to start the service, place canaries and check the
post-conditions in `after` is the harness's own work.

observed (one run, one session step or one batch item) is a dict with, as far as known:
  status, exit_code, signal, stdout, stderr, stdout_truncated, stderr_truncated, duration_s,
  wall_s, http_status, body, result, error_name, session_lost, test_verdict, match, success,
  files (dict), metrics (dict)
"""

# pyright: basic

import re
from typing import Any

SKIP = {"after", "any_of", "relation", "items", "steps", "order_preserved", "count"}


def check(expect: dict[str, Any], obs: dict[str, Any]) -> list[str]:  # noqa: C901 - as it came
    """Return a list of differences; an empty list is a pass."""
    bad = []
    if "any_of" in expect:
        tries = [check(e, obs) for e in expect["any_of"]]
        if all(tries):
            bad.append("none of the alternatives: " + " | ".join("; ".join(t) for t in tries))
    out, err = obs.get("stdout") or "", obs.get("stderr") or ""
    text = {"stdout": out, "stderr": err, "result": obs.get("result") or ""}
    for key, want in expect.items():
        if key in SKIP:
            continue
        if key in (
            "status_in",
            "exit_code_in",
            "signal_in",
            "http_status_in",
            "stdout_in",
            "error_name_in",
        ):
            got = obs.get(key[:-3])
            if got not in want:
                bad.append(f"{key[:-3]} {got!r} not in {want!r}")
        elif key == "status_not_in":
            if obs.get("status") in want:
                bad.append(f"status {obs.get('status')!r} is excluded")
        elif (
            key.endswith("_contains")
            and key != "body_contains"
            and not key.endswith("_not_contains")
        ):
            for w in want:
                if w not in text[key[:-9]]:
                    bad.append(f"{w!r} missing in {key[:-9]}")
        elif key.endswith("_not_contains"):
            for w in want:
                if w in text[key[:-13]]:
                    bad.append(f"{w!r} present in {key[:-13]}")
        elif key == "body_contains":
            for w in want:
                if w not in (obs.get("body") or ""):
                    bad.append(f"{w!r} missing in the body")
        elif key.endswith("_regex"):
            if not re.search(want, text[key[:-6]]):
                bad.append(f"{key[:-6]} {text[key[:-6]][:200]!r} does not match {want!r}")
        elif key == "stdout_len":
            if len(out) != want:
                bad.append(f"stdout has {len(out)} characters, not {want}")
        elif key in ("stdout_max_bytes", "stderr_max_bytes", "result_max_bytes"):
            n = len(text[key.split("_")[0]].encode("utf-8", "surrogatepass"))
            if n > want:
                bad.append(f"{key}: {n} > {want}")
        elif key in ("wall_s_max", "duration_s_max"):
            got = obs.get(key[:-4])
            if got is not None and got > want:
                bad.append(f"{key[:-4]} {got:.2f} > {want}")
        elif key in ("wall_s_min", "duration_s_min"):
            got = obs.get(key[:-4])
            if got is not None and got < want:
                bad.append(f"{key[:-4]} {got:.2f} < {want}")
        elif key == "result_absent":
            if obs.get("result") not in (None, ""):
                bad.append(f"unexpected result {obs['result']!r}")
        elif key == "files_absent":
            for f in want:
                if f in (obs.get("files") or {}):
                    bad.append(f"file {f!r} was returned")
        elif key == "metrics":
            for m, w in want.items():
                got = (obs.get("metrics") or {}).get(m)
                if isinstance(w, list):
                    if got is None or not w[0] <= got <= w[1]:
                        bad.append(f"metric {m} = {got!r}, wanted {w}")
                elif got != w:
                    bad.append(f"metric {m} = {got!r}, wanted {w!r}")
        else:  # plain equality: stdout, verdicts, flags
            if obs.get(key) != want:
                bad.append(f"{key} is {obs.get(key)!r}, wanted {want!r}")
    return bad


def relation(rel: dict[str, Any], observed: list[dict[str, Any]]) -> list[str]:
    vals = [o.get(rel["field"]) for o in observed]
    if rel["type"] == "all_distinct" and len(set(vals)) != len(vals):
        return [f"repeated {rel['field']}"]
    if rel["type"] == "all_equal" and len(set(vals)) != 1:
        return [f"{rel['field']} differs"]
    return []
