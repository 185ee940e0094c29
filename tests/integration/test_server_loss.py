"""The queue's server is killed and forgets everything, attempts too."""

import asyncio

from cases.crew import Crew, crew

import rollyard


def test_an_older_execution_s_end_is_no_result_of_the_new_one() -> None:
    """The one worker gets a run again that it still runs, as attempt 1 once more.

    It stops the older execution; had that one's end counted, the caller would read `cancelled`.
    """

    async def play(service: Crew) -> rollyard.RunResult:
        code = "import time\ntime.sleep(3)\nprint('whole')"
        async with rollyard.AsyncClient(service.address) as client:
            waiting = asyncio.create_task(client.run(code, run_id="again"))
            await asyncio.to_thread(service.holder)
            service.queue_server.kill()
            await asyncio.to_thread(service.gateway.said, "queue.lost")
            # Not by a thread of the loop's: the server dies with the thread that started it.
            service.start_queue_server()
            return await waiting

    # The usual lease: with a short one a renewal might tell the worker before the claim does.
    with crew("forgotten", workers=1, slots=4) as service:
        result = asyncio.run(play(service))
        assert service.unfinished_keys() == []
    assert (result.outcome, result.stdout, result.attempt) == ("ok", "whole\n", 1)
