"""The machine code of the CUDA library: cuda/device/*.cu compiled by NVRTC for each
architecture, and images.c, which carries the results. setup.py compiles that file and
the host's with the C compiler.

cuda/kernels.h lists files and kernels. Each (file, architecture) is an image in
build/objects/, in a folder named after a hash of everything that it is made from.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path

import nvrtc
from setuptools.errors import CompileError, OptionError

RELEASE_ARCHS = [75, 80, 90, 120]  # a GPU of 86 or 89 runs the code for 80
DEFAULT_ARCHS = [75, 80, 90]
OLDEST = 75
INCLUDE = ["cuda/device", "cuda", "csrc"]
# Bits must agree with the CPU's: no contraction.
OPTIONS = ["--std=c++17", "-fmad=false", "-default-device", "--ptxas-options=-v"]

# Prints the list of kernels.h: a line of any length, which kernel_list() takes apart.
LISTING = """
#include "kernels.h"
#define KERNEL(path, id, arguments, rows, threads, shared, ...) \\
    @kernel path id #__VA_ARGS__
#define FILE(name) @file name KERNELS_OF_##name(KERNEL)
TFAST_DEVICE_FILES(FILE)
"""


class NoNvrtc(Exception):
    """There are neither images nor NVRTC to make them with."""


@dataclass(frozen=True)
class Image:
    """What one file of cuda/device/ is for one architecture."""

    file: str  # of TFAST_DEVICE_FILES
    index: int  # in that list
    arch: int  # 75, 80, ...; of PTX the least that runs it
    is_ptx: bool
    expressions: dict  # {id: name in C++} of the kernels that the architecture has
    sources: str  # a hash of what it is made from
    path: str = ""  # of the machine code; PTX ends with a 0 byte
    names: dict | None = None  # {id: name in the image}
    registers: dict | None = None  # {id: what ptxas says}, {} of PTX

    @property
    def target(self):
        return f"{'compute' if self.is_ptx else 'sm'}_{self.arch}"

    @property
    def filename(self):
        return f"{self.file}.{self.target}.{'ptx' if self.is_ptx else 'cubin'}"


# ---- What is compiled for whom -------------------------------------------------------


def ptx_of(arch):
    """The architecture whose PTX stands in for an architecture's code. The sources ask
    only whether it is 80 or later."""
    return min(arch, 80)


def choose_archs(known, version, wanted):
    """The architectures to compile for, and the one whose PTX is added, or None.

    Args:
        known: Those that NVRTC has code for, in order.
        version: NVRTC's.
        wanted: TRAINFAST_CUDA_ARCHS.
    """
    known = [arch for arch in known if arch >= OLDEST]
    rule = f"NVRTC {version} has " + ", ".join(map(str, known))
    if wanted and wanted != "all":
        archs = re.split(r"[;,\s]+", wanted.strip("; ,"))
        if not all(re.fullmatch(r"\d+", arch) for arch in archs):
            must = 'must be "all" or numbers such as "75;86"'
            raise OptionError(f"TRAINFAST_CUDA_ARCHS {must}, got {wanted!r}")
        archs = sorted(set(map(int, archs)))
        if not set(archs) <= set(known):
            must = "must be architectures that can be built"
            raise OptionError(f"TRAINFAST_CUDA_ARCHS {must}, got {wanted!r}; {rule}")
        return archs, ptx_of(archs[-1])
    visible = nvrtc.gpu_archs()
    if visible and not wanted:
        if visible[0] < OLDEST:
            must = f"must be at least {OLDEST}"
            raise CompileError(f"the GPU's architecture {must}, got {visible[0]}")
        own = [arch for arch in visible if arch in known]
        # A GPU newer than this NVRTC runs PTX.
        return own, None if own == visible else ptx_of(known[-1])
    choice = RELEASE_ARCHS if wanted else DEFAULT_ARCHS
    archs = [arch for arch in choice if arch in known]
    return archs, ptx_of(archs[-1])


def kernel_list(cc):
    """{file: [(path, id, name in C++)]} of cuda/kernels.h, as the C preprocessor cc
    expands its macros."""
    command = [*cc, "-E", "-P", "-x", "c", *(f"-I{folder}" for folder in INCLUDE), "-"]
    done = subprocess.run(command, input=LISTING, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"cuda/kernels.h\n{done.stderr}")
    found = {}
    pattern = r'@file (\w+)|@kernel (\d+) (\w+) "([^"]*)"'
    for file, path, id, name in re.findall(pattern, done.stdout):
        if file:
            kernels = found[file] = []
        else:
            kernels.append((int(path), id, name))
    return found


def with_includes(source):
    """A source and what it includes, under any condition, as paths in order."""
    found = []
    waiting = [Path(source)]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.append(path)
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.M):
            tried = [folder / name for folder in (path.parent, *map(Path, INCLUDE))]
            waiting += [file for file in tried if file.exists()][:1]
    return sorted(found)


def digest(*parts):
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def sources_of(file, names, arch, is_ptx):
    """A hash of what an image is made from."""
    files = with_includes(f"cuda/device/{file}.cu")
    text = [(path.as_posix(), path.read_text()) for path in files]
    return digest(text, names, arch, is_ptx)


def planned(kernels, archs, ptx):
    """The images for some architectures, none of them compiled yet."""
    targets = [(arch, False) for arch in archs] + ([(ptx, True)] if ptx else [])
    images = []
    for index, (file, listed) in enumerate(kernels.items()):
        for arch, is_ptx in targets:
            path = 75 if arch < 80 else 80
            names = {id: name for where, id, name in listed if where in (0, path)}
            if names:
                sources = sources_of(file, names, arch, is_ptx)
                images.append(Image(file, index, arch, is_ptx, names, sources))
    return images


# ---- Compiling -----------------------------------------------------------------------


def registers_of(log, names):
    """{id: {"registers": ..., "stack": ..., ...}} from what ptxas says."""
    pattern = (
        r"Compiling entry function '(\w+)' for '\w+'[^']*?(\d+) bytes stack frame, "
        r"(\d+) bytes spill stores, (\d+) bytes spill loads\s+"
        r"ptxas info\s+: Used (\d+) registers([^\n]*)"
    )
    said = {}
    for name, stack, stores, loads, registers, rest in re.findall(pattern, log):
        shared = re.search(r"(\d+) bytes smem", rest)
        said[name] = {
            "registers": int(registers),
            "stack": int(stack),
            "spill_stores": int(stores),
            "spill_loads": int(loads),
            "shared": int(shared[1]) if shared else 0,
        }
    return {id: said[name] for id, name in names.items()}


def warnings_of(log):
    """NVRTC's log without ptxas's lines about registers."""
    lines = re.sub(r"^ptxas (?:info    :|        \.) .*\n", "", log, flags=re.M)
    return lines.strip()


class Compiler:
    """NVRTC as this build uses it."""

    def __init__(self, library, objects, debug=False, strict=False):
        self.library, self.objects, self.strict = library, Path(objects), strict
        self.program = [sys.executable, nvrtc.__file__, library]
        said = json.loads(self.run())
        self.version, self.known = said
        self.options = [*OPTIONS, *(f"-I{folder}" for folder in INCLUDE)]
        self.options += ["-lineinfo"] if debug else []

    def run(self, *job):
        done = subprocess.run([*self.program, *job], capture_output=True, text=True)
        if done.returncode:
            said = done.stderr or f"{self.library} ended with {done.returncode}"
            raise CompileError(said.strip())
        return done.stdout

    def record(self, image):
        """The path of what is known about a compiled image."""
        size = os.path.getsize(self.library)
        key = digest(image.sources, self.options, self.version, size)[:16]
        return self.objects / key / f"{image.file}.{image.target}.json"

    def compile(self, image):
        record = self.record(image)
        record.parent.mkdir(parents=True, exist_ok=True)
        job = record.with_suffix(".job")
        told = {
            "source": f"cuda/device/{image.file}.cu",
            # Without the seed internal symbols would hold the process's id.
            "options": [
                *self.options,
                f"-arch={image.target}",
                f"-frandom-seed={image.file}",
            ],
            "names": image.expressions,
            "is_ptx": image.is_ptx,
            "image": str(record.with_name(image.filename)),
        }
        job.write_text(json.dumps(told, indent=1))
        record.unlink(missing_ok=True)
        self.run(str(job))
        now = sources_of(image.file, image.expressions, image.arch, image.is_ptx)
        if now != image.sources:
            record.unlink()
            raise CompileError(f"{told['source']} was changed while it was compiled")
        words = warnings_of(json.loads(record.read_text())["log"])
        if words and not self.strict:
            print(words, flush=True)

    def compile_all(self, images, force, say):
        """Compiles what is not in build/objects/ in parallel; returns all images."""
        stale = [im for im in images if force or not self.record(im).exists()]
        # The longest first: those of many kernels.
        stale.sort(key=lambda image: -len(image.expressions))
        what = f"files of device code by NVRTC {self.version} for " + words(images)
        if stale:
            say(f"compiling {len(stale)} of {len(images)} {what} (can take minutes)")
        start = time.monotonic()
        with ThreadPool(len(os.sched_getaffinity(0))) as pool:
            pool.map(self.compile, stale, chunksize=1)
        if stale:
            seconds = time.monotonic() - start
            say(f"compiled {len(stale)} of {len(images)} {what} in {seconds:.1f} s")
        return [self.completed(image) for image in images]

    def completed(self, image):
        record = self.record(image)
        known = json.loads(record.read_text())
        log, names = known["log"], known["names"]
        if self.strict and warnings_of(log):
            raise CompileError(f"{warnings_of(log)}\nwarnings are errors")
        path = str(record.with_name(image.filename))
        registers = {} if image.is_ptx else registers_of(log, names)
        return replace(image, path=path, names=names, registers=registers)


def words(images):
    """Architectures in words: "sm_75, PTX 80"."""
    targets = [f"PTX {im.arch}" if im.is_ptx else im.target for im in images]
    return ", ".join(dict.fromkeys(targets))


# ---- Images that the source carries --------------------------------------------------


def save_prebuilt(images, root):
    """Copies images into the source tree at root, which load_prebuilt() then finds."""
    folder = (root / nvrtc.PREBUILT).parent
    folder.mkdir(parents=True, exist_ok=True)
    for image in images:
        shutil.copyfile(image.path, folder / image.filename)
    listed = [asdict(replace(image, path=image.filename)) for image in images]
    (root / nvrtc.PREBUILT).write_text(json.dumps(listed, indent=1))


def load_prebuilt(kernels):
    """The images that the source carries.

    Raises:
        NoNvrtc: the device code has changed since.
    """
    folder = nvrtc.PREBUILT.parent
    images = [Image(**values) for values in json.loads(nvrtc.PREBUILT.read_text())]
    archs = sorted({image.arch for image in images if not image.is_ptx})
    ptx = max((image.arch for image in images if image.is_ptx), default=None)
    current = [image.sources for image in planned(kernels, archs, ptx)]
    if [image.sources for image in images] != current:
        raise NoNvrtc("the code in cuda/images/ is of other sources than these")
    return [replace(image, path=str(folder / image.path)) for image in images]


# ---- The generated source ------------------------------------------------------------


def kernel_names(images):
    """{id: name in the images}, which every image must agree on."""
    names = {}
    for image in images:
        for id, name in image.names.items():
            if names.setdefault(id, name) != name:
                rule = "must have one name for all architectures"
                raise CompileError(f"{id} {rule}, got {names[id]} and {name}")
    return names


def images_source(kernels, images):
    """The text of images.c, which defines what cuda/images.h declares."""
    names = kernel_names(images)
    data, rows = [], []
    for i, image in enumerate(images):
        label = f"tfast_image_{i}"
        data += [f'    ".balign 64\\n.globl {label}\\n.hidden {label}\\n"']
        data += [f'    "{label}: .incbin \\"{image.path}\\"\\n"']
        size = os.path.getsize(image.path)
        kind = "true" if image.is_ptx else "false"
        values = f"{image.arch}, FILE_{image.file}, {kind}, tfast_image_{i}, {size}"
        rows.append(f"    {{{values}}},")
    ids = [id for listed in kernels.values() for _, id, _ in listed]
    return "\n".join(
        [
            "/* Made by cuda/build_cuda.py. */",
            '#include "images.h"',
            '__asm__(".pushsection .rodata.tfast_images,\\"a\\",%progbits\\n"',
            *data,
            '    ".popsection\\n");',
            *(f"extern const char tfast_image_{i}[];" for i in range(len(images))),
            "const tfast_image tfast_images[] = {",
            *rows,
            "};",
            f"const int tfast_n_images = {len(images)};",
            '__attribute__((visibility("default")))',
            f'const char tfast_library_code[] = "{words(images)}";',
            "const char *const tfast_kernel_names[N_KERNELS] = {",
            *(f'    [KERNEL_{id}] = "{names[id]}",' for id in ids if id in names),
            "};",
            "",
        ]
    )


def write_if_new(path, text):
    """Leaves a file of the same text alone, with its time."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def find_images(cc, objects, *, release, force, say, **how):
    """The list of kernels, and the images of this build: prebuilt or compiled.

    Args:
        cc: The C compiler's command.
        objects: The folder of compiled things.
        release: Whether all architectures are meant where none are named.
        force: Compile even what is up to date.
        say: Prints a line.
        how: debug and strict of Compiler.

    Raises:
        NoNvrtc: there is nothing to compile with.
    """
    kernels = kernel_list(cc)
    stale = ""
    if nvrtc.uses_prebuilt():
        try:
            return kernels, load_prebuilt(kernels)
        except NoNvrtc as error:
            stale = f"{error}, and "
    try:
        library = nvrtc.find()
    except ValueError as error:
        raise OptionError(str(error)) from None
    if not library:
        raise NoNvrtc(f"{stale}NVRTC was not found")
    compiler = Compiler(library, objects, **how)
    wanted = os.environ.get("TRAINFAST_CUDA_ARCHS", "") or ("all" if release else "")
    chosen = choose_archs(compiler.known, compiler.version, wanted)
    images = planned(kernels, *chosen)
    return kernels, compiler.compile_all(images, force, say)


def write_images(kernels, images, objects):
    """Writes images.c and, for tests and readers, images.json, the list of images, and
    cuda.json: {architecture: {id: what ptxas says}}. Returns the path of images.c."""
    said = {}
    for image in images:
        if not image.is_ptx:
            said.setdefault(str(image.arch), {}).update(image.registers)
    write_if_new(Path(objects, "cuda.json"), json.dumps(said, indent=1))
    listed = [asdict(image) for image in images]
    write_if_new(Path(objects, "images.json"), json.dumps(listed, indent=1))
    text = images_source(kernels, images)
    path = Path(objects, digest(text)[:16], "images.c")
    write_if_new(path, text)
    return path.as_posix()
