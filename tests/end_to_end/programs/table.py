"""A row for every call of c10d, dtype, reduction and mistake: the values that it writes, or the error that it raises.

Run by two ranks. Each prints its rows as JSON.
"""

# ruff: noqa: B023 (rows are made at once)

import datetime
import json
import math
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.nn.functional

warnings.simplefilter("ignore")
dist.init_process_group(sys.argv[1], timeout=datetime.timedelta(seconds=5))
rank, size = dist.get_rank(), dist.get_world_size()
rows = {}

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    ),
]
IN_EVERY_CALL = {torch.bool, torch.int64, torch.bfloat16, torch.float32, DTYPES[-1]}
OPS = {
    **{
        name: getattr(dist.ReduceOp, name)
        for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    },
    "PREMUL_SUM": dist._make_nccl_premul_sum(2.0),
}


def of(dtype, values, shape=None):
    """A tensor of `dtype`; gloo's column does no arithmetic in it."""
    made = torch.tensor(values)
    made = made != 0 if dtype is torch.bool else made.to(dtype)
    return made if shape is None else made.reshape(shape)


def own(dtype=torch.float32, length=4):
    return of(dtype, [(3 * each + 5 * rank) % 7 for each in range(length)])


def shown(tensor):
    tensor = tensor.detach()
    if tensor.is_sparse:
        return [shown(tensor.coalesce().indices()), shown(tensor.coalesce().values())]
    if tensor.is_meta:
        return "meta"
    if tensor.dtype == torch.bool:  # gloo adds them up as bytes
        tensor = tensor.view(torch.uint8) != 0
    raw = tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
    return [str(tensor.dtype), list(tensor.shape), bytes(raw.flatten().tolist()).hex()]


def row(name, call, *written):
    """Make a call, which may return a work to wait for; note what is in `written`, or the error and who raised it."""
    assert name not in rows, name
    stage = "call"
    try:
        work = call()
        if hasattr(work, "wait"):
            stage = "wait"
            work.wait()
            work = None
        rows[name] = [str(work), *map(shown, written)]
    except Exception as error:
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        rows[name] = f"{stage} raises {kind.__name__}"


# --- every call with every dtype and reduction -------------------------------------------------------------------

for dtype in DTYPES:
    label = str(dtype).removeprefix("torch.")
    if dtype not in IN_EVERY_CALL:
        for word, op in OPS.items():
            tensor = own(dtype)
            row(f"all_reduce {label} {word}", lambda: dist.all_reduce(tensor, op), tensor)
        tensor = own(dtype)
        row(f"broadcast {label}", lambda: dist.broadcast(tensor, 1), tensor)
        continue
    for word, op in OPS.items():
        for is_async in (False, True)[: 2 if word == "SUM" and dtype == torch.float32 else 1]:
            at = f"{label} {word}" + (" async" if is_async else "")
            tensor = own(dtype)
            row(f"all_reduce {at}", lambda: dist.all_reduce(tensor, op, async_op=is_async), tensor)
            tensor = own(dtype)
            # what reduce leaves in others' tensors is not defined
            row(
                f"reduce {at}", lambda: dist.reduce(tensor, 1, op, async_op=is_async), *[tensor] * (rank == 1)
            )
            out = of(dtype, [0, 0])
            parts = list(own(dtype).split(2))
            row(f"reduce_scatter {at}", lambda: dist.reduce_scatter(out, parts, op, async_op=is_async), out)
            out = of(dtype, [0, 0])
            row(
                f"reduce_scatter_tensor {at}",
                lambda: dist.reduce_scatter_tensor(out, own(dtype), op, async_op=is_async),
                out,
            )
        tensors = [own(dtype), own(dtype, 3)]
        row(f"all_reduce_coalesced {label} {word}", lambda: dist.all_reduce_coalesced(tensors, op), *tensors)
    for is_async in (False, True)[: 2 if dtype == torch.float32 else 1]:
        at = label + (" async" if is_async else "")
        tensor = own(dtype)
        row(f"broadcast {at}", lambda: dist.broadcast(tensor, 1, async_op=is_async), tensor)
        parts = [of(dtype, [0] * 4) for _ in range(size)]
        row(f"all_gather {at}", lambda: dist.all_gather(parts, own(dtype), async_op=is_async), *parts)
        out = of(dtype, [0] * 8)
        row(
            f"all_gather_into_tensor {at}",
            lambda: dist.all_gather_into_tensor(out, own(dtype), async_op=is_async),
            out,
        )
        parts = [of(dtype, [0] * 4) for _ in range(size)]
        row(
            f"gather {at}",
            lambda: dist.gather(own(dtype), parts if rank == 1 else None, 1, async_op=is_async),
            *parts,
        )
        out = of(dtype, [0] * 2)
        parts = list(own(dtype).split(2))
        row(
            f"scatter {at}",
            lambda: dist.scatter(out, parts if rank == 1 else None, 1, async_op=is_async),
            out,
        )
        parts = [of(dtype, [0] * 2) for _ in range(size)]
        row(
            f"all_to_all {at}",
            lambda: dist.all_to_all(parts, list(own(dtype).split(2)), async_op=is_async),
            *parts,
        )
        out = of(dtype, [0] * 4)
        row(
            f"all_to_all_single {at}", lambda: dist.all_to_all_single(out, own(dtype), async_op=is_async), out
        )
    out = of(dtype, [0] * 4)
    row(
        f"isend, irecv {label}",
        lambda: dist.isend(own(dtype), 1) if rank == 0 else dist.irecv(out, 0),
        out,
    )
    row(f"send, recv {label}", lambda: dist.send(own(dtype), 0) if rank == 1 else dist.recv(out, 1), out)
    row(f"recv from anyone {label}", lambda: dist.send(own(dtype), 0) if rank == 1 else dist.recv(out), out)


# --- values at the edges of a dtype ------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
for length in (5, 1000):
    mine, theirs = ([NAN, 1.0, NAN, -0.0], [1.0, NAN, NAN, 0.0])[:: 1 if rank == 0 else -1]
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for word in ("MIN", "MAX"):
            at = f"nan {str(dtype)[6:]} {word} {length}"
            tensor = of(dtype, (mine * length)[:length])
            row(f"all_reduce {at}", lambda: dist.all_reduce(tensor, OPS[word]), tensor)
            for root in range(size):
                tensor = of(dtype, (mine * length)[:length])
                row(
                    f"reduce {root} {at}",
                    lambda: dist.reduce(tensor, root, OPS[word]),
                    *[tensor] * (rank == root),
                )
            out, parts = (
                of(dtype, [0.0] * length),
                list(of(dtype, (mine * 2 * length)[: 2 * length]).split(length)),
            )
            row(f"reduce_scatter {at}", lambda: dist.reduce_scatter(out, parts, OPS[word]), out)
for dtype, values in {
    torch.float32: [3e38, INF, -INF, NAN, 1e-45],
    torch.float16: [60000.0, INF, 6e-8, 2049.0, 1.0],
    torch.bfloat16: [3e38, INF, 256.0, 1.0, 0.1],
    torch.int8: [127, -128, 100, 5, 0],
    torch.uint8: [255, 128, 200, 5, 0],
    torch.int32: [2**31 - 1, -(2**31), 2**30, 5, 0],
    torch.int64: [2**63 - 1, -(2**63), 2**62, 5, 0],
    torch.bool: [True, False, True, False, True],
}.items():
    for word in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BXOR"):
        for turned in (0, 1):
            tensor = of(dtype, values[turned * rank :] + values[: turned * rank])
            row(
                f"extreme {str(dtype)[6:]} {word} {turned}",
                lambda: dist.all_reduce(tensor, OPS[word]),
                tensor,
            )

# --- forms of tensors --------------------------------------------------------------------------------------------


def forms():
    base = (torch.arange(24.0) + 100 * rank).reshape(4, 6)
    yield "empty", torch.empty(0)
    yield "empty rows", torch.empty(0, 3)
    yield "scalar", torch.tensor(3.0 + rank)
    yield "transposed", base.clone().t()
    yield "column", base.clone()[:, 1]
    yield "strided", base.clone()[::2]
    yield "row", base.clone()[2]
    yield "expanded", torch.ones(1, 2).expand(3, 2)
    yield "parameter", torch.nn.Parameter(base.clone())
    yield "graph", torch.nn.Parameter(base.clone()) * 2
    yield "conjugate", torch.view_as_complex(base.clone().reshape(-1, 2)).conj()
    yield "channels last", base.clone().reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    yield "meta", torch.empty(4, device="meta")
    yield "sparse", torch.sparse_coo_tensor([[0, 2 + rank]], [1.0, 2.0], (4,))
    yield "csr", torch.eye(4).to_sparse_csr()
    yield "quantized", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
    yield "nested list", [base]
    yield "tuple", (base, base)
    yield "nothing", None
    yield "number", 3.0


DENSE_ONLY = ("column", "strided", "expanded")  # elsewhere gloo reads and writes past their elements
SHOWABLE = ("csr", "quantized", "nested list", "tuple", "nothing", "number")
CALLS = {
    "all_reduce": lambda tensor: dist.all_reduce(tensor),
    "all_reduce MAX": lambda tensor: dist.all_reduce(tensor, dist.ReduceOp.MAX),
    "all_reduce async": lambda tensor: dist.all_reduce(tensor, async_op=True),
    "all_reduce_coalesced": lambda tensor: dist.all_reduce_coalesced([tensor]),
    "reduce": lambda tensor: dist.reduce(tensor, 1),
    "broadcast": lambda tensor: dist.broadcast(tensor, 0),
    "broadcast async": lambda tensor: dist.broadcast(tensor, 0, async_op=True),
    "send, recv": lambda tensor: dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0),
}
NAMES = [name for name, _ in forms()]
for name, call in CALLS.items():
    for number, form in enumerate(NAMES):
        tensor = [*forms()][number][1]
        if form in DENSE_ONLY and name != "send, recv":
            continue
        has_result = form not in SHOWABLE and (name != "reduce" or rank == 1)
        row(f"form {form} {name}", lambda: call(tensor), *[tensor] * has_result)
for number, form in enumerate(NAMES):
    tensor = [*forms()][number][1]
    if not isinstance(tensor, torch.Tensor) or form in DENSE_ONLY:
        continue
    outs = [tensor.detach().clone() for _ in range(size)] if form not in SHOWABLE else []
    row(f"form {form} all_gather", lambda: dist.all_gather(outs, tensor), *outs)
    outs = [tensor.detach().clone() for _ in range(size)] if form not in SHOWABLE else []
    row(f"form {form} gather", lambda: dist.gather(tensor, outs if rank == 0 else None), *outs)
    outs = [tensor.detach().clone() for _ in range(size)] if form not in SHOWABLE else []
    row(f"form {form} all_to_all", lambda: dist.all_to_all(outs, [tensor] * size), *outs)
    out = tensor.detach().clone() if form not in SHOWABLE else torch.empty(1)
    if form not in ("conjugate", "sparse", *SHOWABLE):  # which the root alone refuses
        row(f"form {form} scatter", lambda: dist.scatter(out, [tensor] * size if rank == 0 else None), out)
    out = tensor.detach().clone() if form not in SHOWABLE else torch.empty(1)
    row(f"form {form} reduce_scatter", lambda: dist.reduce_scatter(out, [tensor] * size), out)

# --- mistakes ----------------------------------------------------------------------------------------------------

here, both = torch.ones(4), torch.ones(8)
outs = [torch.zeros(4), torch.zeros(4)]
MISTAKES = {
    **{f"broadcast src {src}": lambda src=src: dist.broadcast(here, src) for src in (2, -1, None, 1.5, "0")},
    **{f"broadcast group_src {src}": lambda src=src: dist.broadcast(here, group_src=src) for src in (2, -1)},
    **{f"reduce dst {dst}": lambda dst=dst: dist.reduce(here, dst) for dst in (2, -1, None)},
    **{f"gather dst {dst}": lambda dst=dst: dist.gather(here, None, dst) for dst in (2, -1)},
    **{f"scatter src {src}": lambda src=src: dist.scatter(here, None, src) for src in (2, -1)},
    "broadcast src and group_src": lambda: dist.broadcast(here, src=0, group_src=0),
    "gather without a list": lambda: dist.gather(here, None, rank),
    "gather with a list elsewhere": lambda: dist.gather(here, outs, 1 - rank),
    "scatter without a list": lambda: dist.scatter(here, None, rank),
    "scatter with a list elsewhere": lambda: dist.scatter(here, outs, 1 - rank),
    **{
        f"{name} {what}": lambda call=call, given=given: call(given)
        for name, call in {
            "all_gather into": lambda given: dist.all_gather(given, here),
            "gather into": lambda given: dist.gather(here, given, rank),
            "scatter of": lambda given: dist.scatter(torch.zeros(4), given, rank),
            "reduce_scatter of": lambda given: dist.reduce_scatter(torch.zeros(4), given),
            "all_to_all of": lambda given: dist.all_to_all([torch.zeros(4), torch.zeros(4)], given),
            "all_to_all into": lambda given: dist.all_to_all(given, [torch.ones(4), torch.ones(4)]),
            "all_reduce_coalesced of": dist.all_reduce_coalesced,
        }.items()
        for what, given in {
            "no tensors": [],
            "one tensor": [torch.zeros(4)],
            "three tensors": [torch.zeros(4)] * 3,
            "another shape": [torch.zeros(4), torch.zeros(5)],
            "fewer elements": [torch.zeros(3), torch.zeros(3)],
            "another form": [torch.zeros(2, 2), torch.zeros(2, 2)],
            "another dtype": [torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)],
            "mixed dtypes": [torch.zeros(4), torch.zeros(4, dtype=torch.float64)],
            "no list": torch.zeros(2, 4),
            "numbers": [1.0, 2.0],
            "nothing": [None, None],
        }.items()
    },
    **{
        f"{name} {what}": lambda call=call, given=given: call(given)
        for name, call in {
            "all_gather_into_tensor into": lambda given: dist.all_gather_into_tensor(given, here),
            "reduce_scatter_tensor of": lambda given: dist.reduce_scatter_tensor(torch.zeros(4), given),
            "reduce_scatter_tensor into": lambda given: dist.reduce_scatter_tensor(given, both),
            "all_to_all_single into": lambda given: dist.all_to_all_single(given, both),
            "all_to_all_single of": lambda given: dist.all_to_all_single(torch.zeros(8), given),
        }.items()
        for what, given in {
            "8": torch.zeros(8),
            "4": torch.zeros(4),
            "7": torch.zeros(7),
            "2 x 4": torch.zeros(2, 4),
            "4 x 2": torch.zeros(4, 2),
            "scalar": torch.tensor(1.0),
            "float64": torch.zeros(8, dtype=torch.float64),
            "strided": torch.zeros(16)[::2],
            "list": [torch.zeros(4)] * 2,
        }.items()
    },
    **{
        f"all_to_all_single splits {into} {given}": lambda into=into, given=given: dist.all_to_all_single(
            torch.zeros(8), both, into, given
        )
        for into in ([4, 4], [8], [3, 4], [4, 4, 0])
        for given in ([4, 4], [8], [3, 4], [4, 4, 0])
    },
    **{
        f"send to {to}": lambda dst=dst: dist.send(here, dst)
        for to, dst in (("itself", rank), ("none", None))
    },
    **{
        f"isend to {to}": lambda dst=dst: dist.isend(here, dst)
        for to, dst in (("itself", rank), ("none", None))
    },
    "recv from itself": lambda: dist.recv(here, rank),
    "irecv from itself": lambda: dist.irecv(here, rank),
    "send tag -1": lambda: dist.send(here, 1 - rank, tag=-1),
    "recv tag -1": lambda: dist.recv(here, 1 - rank, tag=-1),
    "all_reduce op text": lambda: dist.all_reduce(here, "sum"),
    "all_reduce op none": lambda: dist.all_reduce(here, None),
    "batch nothing": lambda: dist.batch_isend_irecv([]),
    "batch of a call": lambda: dist.batch_isend_irecv([dist.all_reduce]),
    "new_group of no rank": lambda: dist.new_group([]) and None,
    "new_group of rank 2": lambda: dist.new_group([0, 2]),
    "new_group of rank -1": lambda: dist.new_group([-1]),
    "new_group twice the rank": lambda: dist.new_group([0, 0]),
    "new_group of an unknown backend": lambda: dist.new_group([0, 1], backend="carrier pigeon"),
    "new_group of texts": lambda: dist.new_group(["0", "1"]),
    "a group of others": lambda: dist.all_reduce(
        here, group=dist.new_group([1 - rank], use_local_synchronization=True)
    ),
    "get_rank of a group of others": lambda: dist.get_rank(dist.GroupMember.NON_GROUP_MEMBER),
    "get_global_rank": lambda: dist.get_global_rank(dist.group.WORLD, 2),
    "get_group_rank": lambda: dist.get_group_rank(dist.group.WORLD, 2),
    "init again": lambda: dist.init_process_group(sys.argv[1]),
    "destroy no group": lambda: dist.destroy_process_group("x"),
    "monitored_barrier": lambda: dist.monitored_barrier(),
    "barrier": lambda: dist.barrier(),
    "barrier of a device": lambda: dist.barrier(device_ids=[0]),
    "barrier of no devices": lambda: dist.barrier(device_ids=3),
    "objects": lambda: dist.all_gather_object([None] * size, {"a": rank}),
    "too few objects": lambda: dist.all_gather_object([None], {"a": rank}),
    "no pickle": lambda: dist.all_gather_object([None] * size, lambda: None),
    "broadcast_object_list": lambda: dist.broadcast_object_list([rank, None], 0),
    "broadcast_object_list src 2": lambda: dist.broadcast_object_list([1], 2),
    "scatter_object_list into none": lambda: dist.scatter_object_list([], [1, 2], 0),
    "gather_object without a list": lambda: dist.gather_object(1, None, rank),
    "ReduceOp text": lambda: dist.ReduceOp("sum"),
}
ABORTS = {
    "reduce_scatter of another shape",
    "reduce_scatter_tensor of scalar",
    "reduce_scatter_tensor into scalar",
}  # gloo, by a failed check
for name, call in MISTAKES.items():
    if name not in ABORTS:
        row(name, call)

# --- works -------------------------------------------------------------------------------------------------------


def polled(make):
    """A work that is waited for by asking alone."""
    work = make()
    until = time.monotonic() + 3.0
    while not work.is_completed():
        assert time.monotonic() < until, "never completed"
        time.sleep(0.001)
    return work


def asked(name, make, *written, results=True):
    """The tensors of a work that is complete, without a wait; and its other answers."""
    row(f"{name} polled", lambda: polled(make) and None, *written)
    for what, ask in {
        "wait twice": lambda work: [work.wait(), work.wait()],
        "future": lambda work: [shown(each) for each in work.get_future().wait()] if results else work.wait(),
        "chained": lambda work: work.get_future().then(lambda future: len(future.value())).wait(),
        "result": lambda work: [
            work.wait(),
            [shown(each) for each in work.result()] if results else None,
        ],
        "is_success": lambda work: [work.wait(), work.is_success()],
        "exception": lambda work: [work.wait(), work.exception()],
        "source_rank": lambda work: [work.wait(), work._source_rank()],
        "wait for a time": lambda work: work.wait(datetime.timedelta(seconds=5)),
        "wait for no time": lambda work: work.wait(datetime.timedelta(0)),
    }.items():
        row(f"{name} {what}", lambda: ask(make()))


a, b = torch.ones(4), [torch.zeros(4), torch.zeros(4)]
asked("all_reduce", lambda: dist.all_reduce(a.fill_(rank + 1.0), async_op=True), a)
asked("broadcast", lambda: dist.broadcast(a.fill_(rank + 1.0), 1, async_op=True), a)
asked("all_gather", lambda: dist.all_gather(b, torch.full((4,), rank + 1.0), async_op=True), *b)
asked("scatter", lambda: dist.scatter(a, list(torch.eye(4)[:2]) if rank == 0 else None, async_op=True), a)
asked(
    "gather",
    lambda: dist.gather(torch.full((4,), rank + 1.0), b if rank == 1 else None, 1, async_op=True),
    *b,
)
asked(
    "reduce",
    lambda: dist.reduce(a.fill_(rank + 1.0), 0, async_op=True),
    *[a] * (rank == 0),
    results=rank == 0,
)
asked("all_to_all", lambda: dist.all_to_all(b, list(torch.eye(4)[:2] + rank), async_op=True), *b)
asked("barrier", lambda: dist.barrier(async_op=True))
asked("int avg", lambda: dist.all_reduce(torch.ones(4, dtype=torch.int64), OPS["AVG"], async_op=True))

# A line a row: longer ones of two ranks would mix on one pipe.
for name, found in rows.items():
    print(json.dumps([rank, name, found]), flush=True)
