"""Inference in batches of like length, on several worker threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

import torch

from regard.attention.intervene import intervening
from regard.attention.watch import watcher
from regard.errors import UsageError
from regard.native.allocator import reuse_memory

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def in_batches(
    items: Sequence[Item],
    lengths: Sequence[int],
    function: Callable[[list[Item]], Sequence[Answer]],
    *,
    tokens: int = 4096,
    rows: int = 256,
    workers: int = 1,
) -> list[Answer]:
    """Apply a function to batches of items of like length and return the answers in order.

    A batch, padded to its longest item, holds at most so many tokens and rows; a longer item is
    alone. The longest come first, so that too little memory shows at once. Several workers take
    one batch each, on one processor thread each: while many small steps cannot keep several
    threads busy, several batches can.

    Args:
        items: inputs of the function
        lengths: number of tokens of each item
        function: computes the answers of a batch
        tokens: maximum number of tokens in a batch
        rows: maximum number of items in a batch
        workers: number of batches that are computed at once
    """
    if min(tokens, rows, workers) < 1:
        raise UsageError(
            f"batches of {tokens} tokens and {rows} rows by {workers} workers hold nothing; "
            "choose 1 or more"
        )
    order = sorted(range(len(items)), key=lambda i: -lengths[i])
    batches: list[list[int]] = []
    while order:
        count = max(1, min(rows, tokens // max(1, lengths[order[0]])))
        batches.append(order[:count])
        order = order[count:]
    work = [[items[i] for i in batch] for batch in batches]
    reuse_memory()
    in_order = watcher() is not None or intervening()
    workers = 1 if in_order else min(workers, len(work))
    if workers < 2:
        done = list(map(function, work))
    else:
        threads = torch.get_num_threads()
        try:
            # each batch runs with the caller's context variables, such as the active watcher
            contexts = [copy_context() for _ in work]
            with ThreadPoolExecutor(workers, "", torch.set_num_threads, (1,)) as pool:
                done = list(pool.map(lambda here, some: here.run(function, some), contexts, work))
        finally:
            torch.set_num_threads(threads)  # the workers' choice reached the matrix library, too
    by_place = {
        i: answer
        for batch, answers in zip(batches, done, strict=True)
        for i, answer in zip(batch, answers, strict=True)
    }
    return [by_place[i] for i in range(len(items))]
