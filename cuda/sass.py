"""Counts of the machine code (SASS) of the kernels that a build has made, without a
GPU: `python cuda/sass.py` prints them, and `--write` makes them the bounds of
cuda/sass.json, which tests/project/test_sass.py compares each build with.

The counts of a kernel with tensor-core products are those of one turn of its main loop,
which is the one with the most HMMA. A turn is the shortest way through the loop that
passes all of its HMMA, LDSM and wide loads: without the code for rows at the edge, for
rows that are not aligned and for elements that are not finite. A loop inside the main
one counts once.

  issued       instructions of a turn
  before       those from the last barrier to the first HMMA: addresses, and copies
  hmma         tensor-core products of a turn
  conversions  between integer and float in a turn: what a division by an integer leaves
  wide         16-byte stores to global memory in the whole kernel
  registers    of a thread, and `spilled` bytes: as ptxas reports them

The disassembler is nvdisasm, from the wheel nvidia-cuda-nvdisasm or from PATH.
"""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from itertools import pairwise
from pathlib import Path

NAME = "nvidia-cuda-nvdisasm"
# What build_cuda.py writes: the images of the last build.
IMAGES = Path("build/objects/images.json")
BOUNDS = Path("cuda/sass.json")
# These files have no tensor-core products, and no count that is bounded.
LEFT_OUT = ("amp", "attention_plain", "neighbours", "trajectory")
# What grows when code gets worse, and what shrinks.
COSTS, GAINS = ("issued", "before", "conversions", "spilled"), ("share", "wide")


def find_nvdisasm():
    """The path of nvdisasm, or None."""
    for wheel in metadata.distributions(name=NAME):
        for file in wheel.files or ():
            if file.name == "nvdisasm":
                return str(wheel.locate_file(file))
    return shutil.which("nvdisasm")


# ---- Disassembly ---------------------------------------------------------------------


@dataclass
class Code:
    """The instructions of a function, and where its labels stand among them."""

    instructions: list = field(default_factory=list)  # (predicate, opcode, operands)
    labels: dict = field(default_factory=dict)

    def opcode(self, i):
        return self.instructions[i][1]

    def target(self, i):
        """Where a branch goes, or None."""
        _, opcode, operands = self.instructions[i]
        # A call of a label leaves a loop for good; that of a function returns. BRA.DIV
        # leads to code for warps whose lanes have parted.
        found = re.search(r"`\((\.L.+?)\)", operands)
        jumps = opcode.startswith(("BRA", "CALL")) and not opcode.startswith("BRA.DIV")
        return self.labels.get(found[1]) if found and jumps else None

    def always(self, i):
        """Whether instruction i has no predicate, neither a lane's nor a warp's."""
        predicate, _, operands = self.instructions[i]
        return not predicate and not re.search(r"\bU?P\d", operands.split("`")[0])


def disassemble(nvdisasm, image):
    """{name in the image: Code}, or None if nvdisasm cannot read its architecture."""
    done = subprocess.run([nvdisasm, "-c", image], capture_output=True, text=True)
    if done.returncode:
        return None
    found, code = {}, Code()
    pattern = (
        r"\s*\.section\s+\.text\.(?P<section>[^,]+),|(?P<label>[.$\w]+):\s*$|"
        r"\s*/\*[0-9a-f]{4,}\*/\s+(?P<predicate>@!?U?P\w+)?\s*"
        r"(?P<opcode>[A-Z][\w.]*)(?P<operands>.*?);"
    )
    for line in map(re.compile(pattern).match, done.stdout.splitlines()):
        if line and line["section"]:
            code = found[line["section"]] = Code()
        elif line and line["label"]:
            code.labels[line["label"]] = len(code.instructions)
        elif line:
            code.instructions.append(line.group("predicate", "opcode", "operands"))
    return found


# ---- The main loop -------------------------------------------------------------------


def is_key(opcode):
    """Whether every turn of a main loop passes the instruction."""
    wide = opcode.startswith("LDG") and ".128" in opcode
    return wide or opcode.startswith(("HMMA", "LDSM", "LDGSTS"))


def ways_on(code, i):
    """Where instruction i, the last of its block, leads."""
    to, ways = code.target(i), []
    if to is not None:
        ways.append(to)
    ends = to is not None or code.opcode(i).startswith(("EXIT", "RET"))
    if i + 1 < len(code.instructions) and not (ends and code.always(i)):
        ways.append(i + 1)
    return ways


def blocks_of(code):
    """The basic blocks: {first instruction: (end, [first of the next])}."""
    begins = {0, *code.labels.values(), len(code.instructions)}
    for i in range(len(code.instructions)):
        if code.target(i) is not None or code.opcode(i).startswith(("EXIT", "RET")):
            begins.add(i + 1)
    return {
        begin: (end, ways_on(code, end - 1)) for begin, end in pairwise(sorted(begins))
    }


def in_order(blocks, head):
    """The blocks that head leads to, each behind those that lead to it, but for ways
    back."""
    order, seen, waiting = [], {head}, [(head, iter(blocks[head][1]))]
    while waiting:
        _, ways = waiting[-1]
        to = next((to for to in ways if to not in seen), None)
        if to is None:
            order.append(waiting.pop()[0])
        else:
            seen.add(to)
            waiting.append((to, iter(blocks[to][1])))
    return order[::-1]


def turn_of(code, blocks, head):
    """A turn of a loop that passes the block `head`: the indices of its instructions
    from the lowest on, [] if there is none."""
    order = in_order(blocks, head)
    place = {block: i for i, block in enumerate(order)}
    # Of the ways to each block: (keys left out, instructions), the less the better.
    best, closed = {head: ((0, 0), None)}, []
    for block in order:
        end, ways = blocks[block]
        keys = sum(is_key(code.opcode(i)) for i in range(block, end))
        (passed, length), _ = best[block]
        cost = (passed - keys, length + end - block)
        for to in ways:
            if to == head:
                closed.append((cost, block))
            elif place[to] > place[block] and (to not in best or cost < best[to][0]):
                best[to] = (cost, block)
    at, turn = min(closed, default=((), None))[1], []
    while at is not None:
        turn[:0] = range(at, blocks[at][0])
        at = best[at][1]
    lowest = turn.index(min(turn)) if turn else 0
    return turn[lowest:] + turn[:lowest]


def main_loop(code):
    """The opcodes of a turn of the loop with the most HMMA, [] if there is none."""
    blocks, best = blocks_of(code), []
    heads = {to for i, (_, ways) in blocks.items() for to in ways if to <= i}
    for head in sorted(heads):
        turn = [code.opcode(i) for i in turn_of(code, blocks, head)]
        if (count(turn, "HMMA"), -len(turn)) > (count(best, "HMMA"), -len(best)):
            best = turn
    return best if count(best, "HMMA") else []


# ---- Counts --------------------------------------------------------------------------


def count(opcodes, *names):
    return sum(opcode.startswith(names) for opcode in opcodes)


def before_products(turn):
    """Instructions from the last barrier to the first HMMA of a turn, which may begin
    between the two."""
    first = next(i for i, opcode in enumerate(turn) if opcode.startswith("HMMA"))
    ahead = (turn + turn[:first])[::-1]
    found = [i for i, opcode in enumerate(ahead) if opcode.startswith("BAR")]
    return found[0] if found else first


def counts_of(code, registers):
    """What the head of this file lists, as a dict; of a kernel without HMMA less."""
    whole = [opcode for _, opcode, _ in code.instructions]
    said = {
        "registers": registers["registers"],
        "spilled": registers["spill_stores"] + registers["spill_loads"],
    }
    turn = main_loop(code)
    if turn:
        hmma = count(turn, "HMMA")
        said["issued"], said["before"] = len(turn), before_products(turn)
        said["hmma"], said["share"] = hmma, round(hmma / len(turn), 3)
        said["conversions"] = count(turn, "I2F", "F2I")
    else:
        stores = [opcode for opcode in whole if opcode.startswith("STG")]
        said["wide"] = sum(".128" in opcode for opcode in stores)
    return said


def counts_of_images(nvdisasm, images):
    """{architecture: {kernel: counts}} of the images in IMAGES; the counts of an
    architecture that nvdisasm cannot read are None."""
    found = {}
    for image in images:
        if image["is_ptx"] or image["file"] in LEFT_OUT:
            continue
        arch = str(image["arch"])
        codes = disassemble(nvdisasm, image["path"])
        if codes is None:
            found[arch] = None
        elif found.setdefault(arch, {}) is not None:
            for id, name in image["names"].items():
                counts = counts_of(codes[name], image["registers"][id])
                found[arch][id] = counts
    return found


def worse(counts, bounds):
    """What of a kernel's counts is worse than its bounds, in words."""
    said = []
    for name, bound in bounds.items():
        got = counts.get(name)
        if (name in COSTS and (got is None or got > bound)) or (
            name in GAINS and (got is None or got < bound)
        ):
            said.append(f"{name} {got}, was {bound}")
    return said


def table_text(found):
    """JSON with a line for each kernel."""
    archs = []
    for arch, kernels in found.items():
        rows = [f'  "{id}": {json.dumps(had)}' for id, had in kernels.items()]
        archs.append(f' "{arch}": {{\n' + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(archs) + "\n}\n"


def main(*arguments):
    nvdisasm = find_nvdisasm()
    if not nvdisasm or not IMAGES.exists():
        raise SystemExit(f"needs a build with CUDA, and pip install {NAME}")
    found = counts_of_images(nvdisasm, json.loads(IMAGES.read_text()))
    found = {arch: kernels for arch, kernels in found.items() if kernels}
    if arguments == ("--write",):
        BOUNDS.write_text(table_text(found))
    else:
        print(table_text(found), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
