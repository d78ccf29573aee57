"""The house's rules about its own source and binaries. Each check is a function of a
tree that returns what breaks the rule, and is tried on a planted violation first."""

import ast
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import trainfast._core

ROOT = Path(__file__).resolve().parents[2]
MODULE = Path(trainfast._core.__file__)
CUDA_LIBRARY = MODULE.with_name("libtrainfast_cuda.so")

# Which folders' headers a folder's files may include. "csrc" stands for the headers
# that lie in it directly: the contract and the small things that every layer shares.
MAY_INCLUDE = {
    "csrc": {"csrc"},
    "csrc/graph_cache": {"csrc/graph_cache", "csrc"},
    "csrc/graph_cache/python": {
        "csrc/graph_cache/python",
        "csrc/graph_cache",
        "csrc/python",
        "csrc",
    },
    "csrc/kernels": {"csrc/kernels", "csrc"},
    "csrc/python": {"csrc/python", "csrc/graph_cache", "csrc"},
    "csrc/simd": {"csrc/simd", "csrc/kernels", "csrc"},
    "cuda": {"cuda", "csrc"},
    "cuda/device": {"cuda/device", "cuda", "csrc"},
}
# The module's list of methods and types names those of the graph cache's wing; nothing
# else in csrc/python knows that wing.
MAY_ALSO_INCLUDE = {"csrc/python/module.c": {"csrc/graph_cache/python"}}
# System headers that only some folders may name.
RESERVED_HEADERS = {
    r"Python\.h|structmember\.h": {"csrc/python", "csrc/graph_cache/python"},
    r"numpy/.*": {"csrc/python"},
    # The CUDA Toolkit is not needed to build: cuda/ declares what it calls.
    r"cuda.*|cublas.*|mma\.h|cooperative_groups.*|nv.*": set(),
    r".*intrin\.h|arm_.*": {"csrc/simd"},
}
FORBIDDEN_CALLS = (
    r"\b(_?exit|_Exit|quick_exit|abort|v?f?printf|puts|fputs|putchar|perror)\s*\("
)
ONLY_CUDA = {"gemm"}  # what has no kernels for the CPU
MAY_IMPORT_TORCH_LAZILY = ("bench/", "roof.py", "patching/", "stats.py", "tools/")


def files(root, *patterns):
    found = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    return [path for path in found if "build" not in path.relative_to(root).parts]


def c_files(root, tops=("csrc", "cuda")):
    kinds = ("*.c", "*.h", "*.cpp", "*.cu", "*.cuh")
    return files(root, *(f"{top}/**/{kind}" for top in tops for kind in kinds))


def python_files(root):
    tops = ("trainfast", "tests", "benchmarks", "examples")
    return files(
        root, "*.py", ".ci/*.py", "cuda/*.py", *(f"{top}/**/*.py" for top in tops)
    )


def code_lines(path):
    """(number, line) pairs of a C file without comments and string contents."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'

    def blank(match):
        text = match[0]
        return '""' if text[0] == '"' else "\n" * text.count("\n")

    text = re.sub(pattern, blank, path.read_text(), flags=re.DOTALL)
    return list(enumerate(text.splitlines(), 1))


def includes(path):
    """(number, kind, name) for each #include: kind is '"' or '<'."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*(["<])([^">]+)', line)
        if match:
            yield number, match[1], match[2]


def wrong_include_directions(root):
    wrong = []
    for path in c_files(root):
        name_in_tree = path.relative_to(root).as_posix()
        folder = path.parent.relative_to(root).as_posix()
        also = MAY_ALSO_INCLUDE.get(name_in_tree, set())
        for number, kind, name in includes(path):
            if kind == "<":
                continue
            places = [path.parent, root / "cuda", root / "csrc"]
            tried = [(place / name).resolve() for place in places]
            target = next((file for file in tried if file.exists()), tried[0])
            inside = target.is_relative_to(root)
            where = target.parent.relative_to(root).as_posix() if inside else "outside"
            if where not in MAY_INCLUDE.get(folder, set()) | also:
                wrong.append(f"{path}:{number}: {folder} includes {name} of {where}")
    return wrong


def headers_out_of_place(root):
    wrong = []
    for path in c_files(root):
        folder = path.parent.relative_to(root).as_posix()
        for number, kind, name in includes(path):
            for pattern, allowed in RESERVED_HEADERS.items():
                reserved = kind == "<" and re.fullmatch(pattern, name)
                if reserved and folder not in allowed:
                    wrong.append(f"{path}:{number}: <{name}> in {folder}")
    return wrong


def forbidden_calls(root):
    return [
        f"{path}:{number}: {line.strip()}"
        for path in c_files(root)
        for number, line in code_lines(path)
        if re.search(FORBIDDEN_CALLS, line)
    ]


def macros_that_name_functions(root):
    """Macros that build a name from parts, or that stand for a function's name: grep,
    profilers and debuggers find functions by the names in the source."""
    wrong = []
    for path in c_files(root, ("csrc",)):
        for number, line in code_lines(path):
            pasted = re.search(r"\w\s*##\s*\w", line)
            renamed = re.match(r"\s*#\s*define (vr\w*|R\(\w*\)) ", line)
            if pasted or renamed:
                wrong.append(f"{path}:{number}: {line.strip()}")
    return wrong


def torch_imports(tree):
    """(node, lazy) for each import of torch that can run; lazy: inside a function."""

    def visit(node, lazy):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            children = node.orelse
        else:
            children = ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            names = [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
        else:
            names = []
        if any(name.split(".")[0] == "torch" for name in names):
            yield node, lazy
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in children:
            yield from visit(child, inside)

    return visit(tree, False)


def torch_out_of_place(root):
    wrong = []
    for path in files(root, "trainfast/**/*.py"):
        name = path.relative_to(root / "trainfast").as_posix()
        if name.startswith("torch/"):
            continue
        may_be_lazy = name.startswith(MAY_IMPORT_TORCH_LAZILY)
        for node, lazy in torch_imports(ast.parse(path.read_text())):
            if not (lazy and may_be_lazy):
                wrong.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    return wrong


def private_names_of_torch(root):
    """`_name` of torch's modules outside the one file that may use them."""
    wrong = []
    for path in files(root, "trainfast/**/*.py"):
        if path.relative_to(root).as_posix() == "trainfast/torch/private.py":
            continue
        nodes = list(ast.walk(ast.parse(path.read_text())))
        found, modules = [], set()  # dotted names of torch; what they are bound to
        for node in nodes:
            if isinstance(node, ast.Import):
                names = [alias for alias in node.names if of_torch(alias.name)]
                found += [(node.lineno, alias.name) for alias in names]
                modules |= {a.asname or a.name.partition(".")[0] for a in names}
            elif isinstance(node, ast.ImportFrom) and of_torch(node.module or ""):
                found += [(node.lineno, f"{node.module}.{a.name}") for a in node.names]
                modules |= {alias.asname or alias.name for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.Attribute):
                name = ast.unparse(node)
                if name.partition(".")[0] in modules and "(" not in name:
                    found.append((node.lineno, name))
        wrong += [
            f"{path}:{number}: {name} belongs into trainfast/torch/private.py"
            for number, name in found
            if re.search(r"\._(?!_)", name)
        ]
    return wrong


def of_torch(module):
    return module.partition(".")[0] == "torch"


def long_files_and_lines(root):
    wrong = []
    c_everywhere = c_files(root, ("csrc", "cuda", "tests", "benchmarks"))
    for path in [*c_everywhere, *python_files(root)]:
        lines = path.read_text().splitlines()
        if len(lines) > 600:
            wrong.append(f"{path}: {len(lines)} lines, more than 600")
        if path.name.startswith("vec_"):
            continue  # one operation a line, readable as a table
        for number, line in enumerate(lines, 1):
            if len(line) > 88:
                wrong.append(f"{path}:{number}: {len(line)} columns, more than 88")
    return wrong


def long_functions(root):
    """Functions of more than 60 lines; docstrings are free."""
    spans = []
    for path in c_files(root):
        start = 0
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line == "{":  # the style puts a function's braces in the first column
                start = number
            elif line == "}" and start:
                spans.append((path, start, number - start))
                start = 0
    for path in python_files(root):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node, clean=False) or ""
                lines = node.end_lineno - node.lineno - text.count("\n")
                spans.append((path, node.lineno, lines))
    return [f"{path}:{at}: {lines} lines" for path, at, lines in spans if lines > 60]


def capabilities(root):
    """The first words of the operations of the backend table in tfast.h."""
    text = (root / "csrc/tfast.h").read_text()
    names = re.findall(r"tfast_status \(\*(?!tfast_)(\w+)\)\(", text)
    return sorted({name.partition("_")[0] for name in names})


def missing_layers(root):
    """Files that a capability lacks: its word names its file in every layer."""
    layers = ("csrc/{}.c", "csrc/kernels/{}*.h", "csrc/python/{}.c", "cuda/{}.c")
    proofs = ("tests/**/test_{}*.py", "benchmarks/bench_{}.py")
    return [
        layer.format(word)
        for word in capabilities(root)
        for layer in (*layers, *proofs)
        if not list(root.glob(layer.format(word)))
        and not (word in ONLY_CUDA and "kernels" in layer)
    ]


CHECKS = [
    wrong_include_directions,
    headers_out_of_place,
    forbidden_calls,
    macros_that_name_functions,
    torch_out_of_place,
    private_names_of_torch,
    long_files_and_lines,
    long_functions,
    missing_layers,
]

PLANTED = [
    (
        wrong_include_directions,
        "csrc/kernels/a.h",
        '#include "../simd/vec_avx2_f32.h"\n',
    ),
    (wrong_include_directions, "csrc/a.c", '#include "python/result.h"\n'),
    (wrong_include_directions, "csrc/tfast.h", '#include "../cuda/ptx.cuh"\n'),
    (wrong_include_directions, "cuda/a.c", '#include "kernels/tile.h"\n'),
    (wrong_include_directions, "csrc/a.h", '#  include "../../other/a.h"\n'),
    (
        wrong_include_directions,
        "csrc/graph_cache/a.c",
        '#include "python/binding.h"\n',
    ),
    (
        wrong_include_directions,
        "csrc/python/a.c",
        '#include "../graph_cache/python/binding.h"\n',
    ),
    (
        wrong_include_directions,
        "csrc/graph_cache/python/a.c",
        '#include "../../kernels/tile.h"\n',
    ),
    (headers_out_of_place, "csrc/a.c", "#include <Python.h>\n"),
    (headers_out_of_place, "csrc/graph_cache/a.c", "#include <Python.h>\n"),
    (
        headers_out_of_place,
        "csrc/graph_cache/python/a.c",
        "#include <numpy/arrayobject.h>\n",
    ),
    (headers_out_of_place, "csrc/a.c", "#include <immintrin.h>\n"),
    (headers_out_of_place, "csrc/python/a.c", "# include <cuda_runtime.h>\n"),
    (headers_out_of_place, "csrc/simd/a.c", "#include <numpy/arrayobject.h>\n"),
    (forbidden_calls, "csrc/a.c", "void a(void) { exit(1); }\n"),
    (forbidden_calls, "cuda/a.c", "/* why */ abort ();\n"),
    (forbidden_calls, "csrc/python/a.c", 'x = "a"; fprintf(stderr, "b");\n'),
    (macros_that_name_functions, "csrc/a.h", "#define R(name) name##_f32\n"),
    (macros_that_name_functions, "csrc/simd/a.h", "#    define vr_add vf_add\n"),
    (torch_out_of_place, "trainfast/a.py", "import torch.optim\n"),
    (torch_out_of_place, "trainfast/a.py", "if True:\n    from torch import nn\n"),
    (torch_out_of_place, "trainfast/tools/a.py", "import os, torch\n"),
    (torch_out_of_place, "trainfast/a.py", "def a():\n    import torch\n"),
    (torch_out_of_place, "trainfast/a.py", 'a = import_module("torch.optim")\n'),
    (private_names_of_torch, "trainfast/a.py", "import torch\na = torch._C._x()\n"),
    (
        private_names_of_torch,
        "trainfast/torch/a.py",
        "from torch import _foreach_add\n",
    ),
    (private_names_of_torch, "trainfast/a.py", "from torch._ops import OpOverload\n"),
    (
        private_names_of_torch,
        "trainfast/a.py",
        "def a():\n    from torch.nn import functional as F\n    F._in(1)\n",
    ),
    (long_files_and_lines, "csrc/a.h", "/* " + "a" * 84 + " */\n"),
    (long_files_and_lines, "tests/a.py", "a = 1\n" * 601),
    (long_functions, "csrc/a.c", "void\na(void)\n{\n" + "    b();\n" * 61 + "}\n"),
    (long_functions, "trainfast/a.py", "def a():\n" + "    b()\n" * 61),
    (
        missing_layers,
        "csrc/tfast.h",
        "    tfast_status (*attention_x)(const tfast_attention_x_args *args);\n",
    ),
]

ALLOWED = [
    (
        wrong_include_directions,
        "csrc/python/module.c",
        '#include "../graph_cache/python/binding.h"\n',
    ),
    (
        wrong_include_directions,
        "csrc/graph_cache/python/a.c",
        '#include "../../python/table.h"\n',
    ),
    (headers_out_of_place, "csrc/graph_cache/python/a.c", "#include <Python.h>\n"),
    (wrong_include_directions, "csrc/simd/a.c", '#include "../kernels/tile.h"\n'),
    (headers_out_of_place, "csrc/simd/a.h", "#include <immintrin.h>\n"),
    (forbidden_calls, "csrc/a.c", '/* exit(1) */ snprintf(a, 9, "printf(1)");\n'),
    (macros_that_name_functions, "csrc/a.h", "#define PANEL (2 * VR_WIDTH)\n"),
    (torch_out_of_place, "trainfast/torch/a.py", "import torch\n"),
    (torch_out_of_place, "trainfast/tools/a.py", "def a():\n    import torch\n"),
    (torch_out_of_place, "trainfast/a.py", "from .torch import AdamW\n"),
    (
        torch_out_of_place,
        "trainfast/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
    ),
    (private_names_of_torch, "trainfast/torch/private.py", "from torch import _a\n"),
    (private_names_of_torch, "trainfast/a.py", "import torch\ntorch.__version__\n"),
    (long_files_and_lines, "csrc/simd/vec_a.h", "a" * 100 + "\n"),
    (long_functions, "trainfast/a.py", 'def a():\n    """' + "b\n" * 90 + '"""\n'),
]


def plant(root, name, text):
    for header in (
        "csrc/graph_cache/python/binding.h",
        "csrc/kernels/tile.h",
        "csrc/python/table.h",
        "csrc/simd/vec_avx2_f32.h",
        "csrc/tfast.h",
    ):
        (root / header).parent.mkdir(parents=True, exist_ok=True)
        (root / header).touch()
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_source_keeps_rule(check):
    wrong = check(ROOT)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("check", "name", "text"), PLANTED)
def test_planted_violation_is_found(check, name, text, tmp_path):
    plant(tmp_path, name, text)
    assert check(tmp_path) != []


@pytest.mark.parametrize(("check", "name", "text"), ALLOWED)
def test_what_rule_allows_is_not_reported(check, name, text, tmp_path):
    plant(tmp_path, name, text)
    assert check(tmp_path) == []


def test_tree_that_is_checked_has_files():
    assert {"adamw", "amp"} <= set(capabilities(ROOT))
    assert len(c_files(ROOT)) > 10
    assert len(python_files(ROOT)) > 10


@pytest.mark.parametrize(
    "header", sorted(ROOT.glob("csrc/kernels/*.h")), ids=lambda path: path.name
)
def test_kernels_header_includes_what_it_needs(header, tmp_path):
    """After any vocabulary, in any order."""
    cc = shutil.which("cc") or shutil.which("gcc")
    if cc is None:
        pytest.skip("needs a C compiler")
    source = tmp_path / "a.c"
    source.write_text(f'#include "simd/vec_scalar_f64.h"\n#include "{header}"\n' * 2)
    flags = ["-std=c11", "-fsyntax-only", "-w", f"-I{ROOT / 'csrc'}"]
    flags += ["-Werror=implicit-function-declaration"]
    subprocess.check_call([cc, *flags, str(source)])


# ---- What was built ----------------------------------------------------------------

GLIBC = re.compile(r"(libc|libm|libdl|libpthread|librt|ld-linux.*)\.so\.\d+")
needs_binutils = pytest.mark.skipif(
    not (shutil.which("nm") and shutil.which("readelf")), reason="needs nm and readelf"
)


def exported(library):
    """The symbols that a library offers to others."""
    command = ["nm", "--dynamic", "--defined-only", str(library)]
    lines = subprocess.check_output(command, text=True).splitlines()
    return {line.split()[-1] for line in lines}


def dynamic_entries(library, *tags):
    """The values of entries such as NEEDED and RUNPATH in a library's header."""
    command = ["readelf", "--dynamic", "--wide", str(library)]
    text = subprocess.check_output(command, text=True)
    return re.findall(rf"\((?:{'|'.join(tags)})\).*\[(.*)\]", text)


@pytest.fixture(params=["module", "cuda"])
def library(request):
    if request.param == "cuda" and not CUDA_LIBRARY.exists():
        pytest.skip("built without CUDA")
    return {"module": MODULE, "cuda": CUDA_LIBRARY}[request.param]


@needs_binutils
def test_library_exports_no_more_than_is_looked_up(library):
    cuda = {"tfast_library_open", "tfast_library_code"}
    assert exported(library) == ({"PyInit__core"} if library == MODULE else cuda)


@needs_binutils
def test_library_has_no_search_path_of_build_machine(library):
    assert dynamic_entries(library, "RPATH", "RUNPATH") == []


@needs_binutils
def test_library_needs_only_glibc(library):
    needed = dynamic_entries(library, "NEEDED")
    assert [name for name in needed if not GLIBC.fullmatch(name)] == []


def wrong_instructions(objects):
    """Objects with 256-bit registers that are not of an instruction set which has them:
    they would crash an older CPU."""
    wrong = []
    for path in objects:
        if path.stem.partition("_")[0] in ("avx2", "avx512"):
            continue
        command = ["objdump", "--disassemble", "--no-show-raw-insn", str(path)]
        if "%ymm" in subprocess.check_output(command, text=True):
            wrong.append(path)
    return wrong


@needs_binutils
def test_objects_outside_simd_use_only_baseline_instructions():
    if platform.machine() != "x86_64" or os.environ.get("CFLAGS"):
        pytest.skip("x86 only, and not with the user's own CFLAGS")
    sources = {path.stem for path in [*c_files(ROOT, ("csrc",)), *ROOT.glob("cuda/*")]}
    objects = sorted(ROOT.glob("build/objects/*/*.o"))
    checked = [path for path in objects if path.stem in sources]
    if not checked:
        pytest.skip("no objects in build/")
    assert wrong_instructions(checked) == []


@needs_binutils
def test_planted_instruction_is_found(tmp_path):
    if platform.machine() != "x86_64":
        pytest.skip("x86 only")
    source = tmp_path / "a.c"
    source.write_text('void a(void) { __asm__("vaddps %ymm0, %ymm1, %ymm2"); }\n')
    objects = [tmp_path / f"{name}.o" for name in ("scalar_f32", "avx2_f32", "backend")]
    for target in objects:
        cc = shutil.which("cc") or "gcc"
        subprocess.check_call([cc, "-c", str(source), "-o", str(target)])
    assert wrong_instructions(objects) == [objects[0], objects[2]]


@needs_binutils
def test_checks_of_binaries_can_fail(tmp_path):
    source = tmp_path / "a.c"
    source.write_text("int other(void) { return 0; }\n")
    bad = tmp_path / "bad.so"
    flags = ["-shared", "-fPIC", "-Wl,-rpath,/nowhere", "-Wl,--no-as-needed"]
    cc = shutil.which("cc") or "gcc"
    subprocess.check_call([cc, *flags, str(source), "-lgcc_s", "-o", str(bad)])
    assert "other" in exported(bad)
    assert dynamic_entries(bad, "RPATH", "RUNPATH") == ["/nowhere"]
    names = dynamic_entries(bad, "NEEDED")
    assert [name for name in names if not GLIBC.fullmatch(name)] == ["libgcc_s.so.1"]
