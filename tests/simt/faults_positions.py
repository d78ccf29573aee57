"""Faults planted in what works on positions, the search for neighbours and the metrics
of trajectories, beside their barriers."""

from tests.simt.fault import BOUNDS, DIFFERS, Fault

KERNELS, HOST, METRICS = "neighbours.cu", "neighbours.c", "trajectory.cu"

FAULTS = {
    "centre found as its own neighbour": Fault(
        KERNELS,
        "return within && i < q.n && @i != q.own@;",
        "true",
        "plain",
        DIFFERS,
    ),
    "centre that keeps itself counted among the others": Fault(
        KERNELS,
        "(most >= 0 && n > most ? most : n) + @q.keeps_own@;",
        "0",
        "plain",
        DIFFERS,
    ),
    "first of the next graph taken for the last": Fault(
        KERNELS,
        "tfast_graph_of(call.centres_ptr, args.n_graphs, @row@);",
        "row > 0 ? row - 1 : 0",
        "plain",
        DIFFERS,
    ),
    "rounded square taken for the exact one": Fault(
        KERNELS,
        "return {(float)(limit * (@1 - 0x1p-19@) - 0x1p-140),",
        "1 + 0x1p-19",
        "plain",
        DIFFERS,
    ),
    "one of equally near ones too many": Fault(
        KERNELS,
        "const bool tie = own == key && @before < ties@;",
        "before <= ties",
        "plain",
        DIFFERS,
    ),
    "equally near ones of each 32 kept": Fault(
        KERNELS,
        "ties -= @equals < ties ? equals : ties@;",
        "0",
        "plain",
        DIFFERS,
    ),
    "as many equally near ones as all that are wanted": Fault(
        KERNELS, "ties = @most - below@;", "most", "plain", DIFFERS
    ),
    "list filled past its room": Fault(
        KERNELS,
        "if (list->n > @call.room - 32@) {",
        "call.room + 64",
        "address",
        f"{BOUNDS}|{DIFFERS}",
    ),
    "edges of earlier tiles of centres forgotten": Fault(
        KERNELS, "int64_t add = @before@;", "0", "plain", f"{BOUNDS}|{DIFFERS}|SEGV"
    ),
    "graphs of the points for those of the centres": Fault(
        HOST,
        "memcpy(table + l->centres_ptr, @args->centres.ptr@, ptr_bytes);",
        "args->points.ptr",
        "plain",
        DIFFERS,
    ),
    "angles in float": Fault(
        HOST, "args->dtype == TFAST_F64 || @args->unit@;", "false", "plain", DIFFERS
    ),
    "step past the last one measured": Fault(
        METRICS,
        "for (int64_t t = l; is_there && t < @a.end@; t += HALF) {",
        "a.end + HALF",
        "address",
        f"{BOUNDS}|{DIFFERS}",
    ),
    "mode past the last one measured": Fault(
        METRICS,
        "const bool own = @mode < args.modes@ &&",
        "true",
        "address",
        f"{BOUNDS}|{DIFFERS}",
    ),
    "steps that do not count measured": Fault(
        METRICS,
        "if (@masked && !counts(args, a.number, t)@) {",
        "false",
        "plain",
        DIFFERS,
    ),
    "final step of the other half taken": Fault(
        METRICS,
        "fde = @t == a.final@ ? d : fde;",
        "t + 1 == a.end - 1",
        "plain",
        DIFFERS,
    ),
    "mode of the upper half forgotten": Fault(
        METRICS, "const int64_t mode = first + @half@;", "0", "plain", DIFFERS
    ),
    "later one of equally probable modes preferred": Fault(
        METRICS, "(@q == p && other < mode@);", "false", "plain", DIFFERS
    ),
    "agents of another block added up": Fault(
        METRICS,
        "const int n = @left < BLOCK ? (int)left : BLOCK@;",
        "BLOCK",
        "address",
        f"{BOUNDS}|{DIFFERS}",
    ),
}
