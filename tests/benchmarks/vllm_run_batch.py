"""vLLM's own batch runner on a file, timed from when its engine is ready. Run as a module by run_batch.py."""

import asyncio
import sys
import time
import warnings

# The same settings that `conserve run` makes, above all that every core computes.
import conserve.engine.vllm.launching.environment as environment

environment.prepare_environment(offline=True)
warnings.filterwarnings("ignore")


def main() -> None:
    """Run the batch and print the seconds it took on the last line."""
    from vllm.entrypoints.launchers import run_batch

    inner = run_batch.run_batch
    spent: list[float] = []

    async def timed(*arguments: object, **named: object) -> None:
        started = time.perf_counter()
        await inner(*arguments, **named)
        spent.append(time.perf_counter() - started)

    run_batch.run_batch = timed
    asyncio.run(run_batch.main(run_batch.parse_args()))
    print(spent[0], file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
