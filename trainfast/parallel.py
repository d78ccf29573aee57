"""`parallel_map`: a function applied to many items in processes."""

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from trainfast.graph_cache.progress import Progress
from trainfast.machine import usable_cores


def parallel_map(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    *,
    workers: int | None = None,
    progress: bool = True,
) -> list[Any]:
    """The results of a function for each item, in the order of the items.

    The items are worked on in other processes, so the function must be one of a module
    or the script. The first error ends it: items that have not begun are left out.

    Args:
        function: called with one item.
        items: the items; read at once.
        workers: processes; None: one less than the cores that this process may use.
        progress: shows a bar, if tqdm is installed.

    Raises:
        ValueError: workers is less than 1.
        Exception: what the function raises, with a note that names the item.
    """
    items = list(items)
    workers = max(1, usable_cores() - 1) if workers is None else workers
    if workers < 1:
        raise ValueError(f"workers must be 1 or more, got {workers}")
    with (
        ProcessPoolExecutor(min(workers, max(1, len(items)))) as pool,
        Progress(progress, len(items), "items") as bar,
    ):
        futures = {pool.submit(function, item): i for i, item in enumerate(items)}
        results: list[Any] = [None] * len(items)
        for future in as_completed(futures):
            i = futures[future]
            try:
                results[i] = future.result()
            except Exception as error:
                pool.shutdown(wait=False, cancel_futures=True)
                error.add_note(f"item {i}: {_short(items[i])}")
                raise
            bar.made(1)
    return results


def _short(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= 200 else text[:200] + "..."
