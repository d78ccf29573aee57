"""The command line as a user calls it, and the parts of its reports."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

import trainfast
from trainfast import cli, machine
from trainfast.tools import env, selftest


def run(*arguments, code=None):
    """`python -m trainfast` with these arguments, or `python -c code`."""
    command = ["-c", code] if code else ["-m", "trainfast", *arguments]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True)


def test_no_verb_prints_the_help():
    done = run()
    assert done.returncode == 0
    for verb in cli.verb_modules():
        assert re.search(rf"\n    {verb}\s", done.stdout)


@pytest.mark.parametrize(
    "arguments",
    [("bad",), ("env", "--bad"), ("selftest", "--backend", "bad"), ("--bad",)],
)
def test_a_wrong_command_line_exits_with_2(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "usage: trainfast" in done.stderr and "bad" in done.stderr


def test_a_reader_that_has_gone_is_no_error():
    """As of `trainfast env | head -1`."""
    command = [sys.executable, "-m", "trainfast", "env"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 128 + 13


def test_version_is_the_packages():
    assert run("--version").stdout == f"trainfast {trainfast.__version__}\n"


def test_verbs_have_what_the_command_line_needs():
    assert {"env", "selftest"} <= set(cli.verb_modules())
    for verb, module in cli.verb_modules().items():
        assert module.__doc__ and callable(module.run), verb
        args = cli.make_parser().parse_args([verb, "--json"])
        assert args.json and args.run is module.run


# ---- env -----------------------------------------------------------------------------


def test_env_prints_versions_and_backends():
    done = run("env")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"trainfast  {trainfast.__version__}\n" in done.stdout
    for backend in trainfast.backends():
        assert f"\n{backend['name']} " in done.stdout
        assert (backend["reason"] or "") in done.stdout


def test_env_json_is_the_same_and_loads_no_torch():
    done = run(
        code="import sys; from trainfast.cli import main; status = main(['env', "
        "'--json']); sys.exit(status or 'torch' in sys.modules)"
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["versions"]["numpy"] == np.__version__
    assert found["backends"] == trainfast.backends()
    assert found["cpu"]["threads used"] >= 1
    assert found["cuda_library"]["path"].endswith(".so")


def test_env_says_when_the_cuda_library_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAINFAST_CUDA_LIBRARY", str(tmp_path / "nowhere.so"))
    assert env.cuda_library() == {
        "path": str(tmp_path / "nowhere.so"),
        "exists": False,
        "code": None,
    }
    assert env.variables()["TRAINFAST_CUDA_LIBRARY"] == str(tmp_path / "nowhere.so")


def test_env_is_a_report_for_notebooks():
    report = env.env()
    html = report._repr_html_()
    assert html.count("<table") == html.count("</table>") >= 4
    assert json.loads(report.to_json()) == report.to_dict()


def test_env_reads_the_processor():
    text = "processor : 0\nmodel name\t: Fast CPU @ 3 GHz\nflags\t\t: sse4_2 fma hle\n"
    assert machine.cpu_model(text) == ("Fast CPU @ 3 GHz", ["sse4_2", "fma"])
    assert machine.cpu_model("Features : fp asimd sve\n")[1] == ["asimd", "sve"]
    assert machine.cpu_model("")[1] == []


def test_env_reads_the_gpus():
    text = "NVIDIA H200, 9.0, 143771 MiB, 580.65.06\nTesla T4, 7.5, 15360 MiB, 580.1\n"
    assert machine.parse_gpus(text)[1] == {
        "name": "Tesla T4",
        "capability": "7.5",
        "memory": "15360 MiB",
        "driver": "580.1",
    }
    assert machine.parse_gpus("No devices were found\n") == []


@pytest.mark.parametrize(
    ("capability", "code", "driver"),
    [
        ("7.5", "sm_75", "525 or newer"),
        ("8.9", "sm_86", "525 or newer"),
        ("9.0", "sm_90", "525 or newer"),
        ("12.1", "sm_120", "570 or newer"),
        ("10.0", "PTX 80", "575 or newer"),
        ("6.1", "none", "no driver helps"),
        ("[N/A]", "unknown", "unknown"),
    ],
)
def test_env_tells_what_a_gpu_needs(capability, code, driver):
    library = "sm_75, sm_80, sm_86, sm_90, sm_120, PTX 80"
    found = env.needs({"capability": capability}, library)
    assert found == {"code": code, "driver needed": driver}
    assert env.needs({"capability": capability}, None) == {}


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/a/b\n", {}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 1\n", "a/cpu.max": "300 100\n"}, 3.0),
        ("0::/a/b\n", {"a/b/cpu.max": "400 100\n", "cpu.max": "200 100\n"}, 2.0),
        ("0::/../b\n", {"cpu.max": "200 100\n"}, 2.0),
        (
            "4:memory:/m\n3:cpu,cpuacct:/a\n0::/\n",
            {
                "cpu,cpuacct/a/cpu.cfs_quota_us": "50000\n",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            "1:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            None,
        ),
    ],
)
def test_env_reads_the_cgroup_quota(tmp_path, own, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.cgroup_quota(tmp_path, own) == quota


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        ("0::/a/b\n", {}, None),
        ("0::/a\n", {"a/memory.max": "max\n", "a/memory.current": "5\n"}, None),
        ("0::/a/b\n", {"a/memory.max": "900\n", "a/memory.current": "500\n"}, 400),
        (  # pages of files count as free
            "0::/\n",
            {
                "memory.max": "900\n",
                "memory.current": "800\n",
                "memory.stat": "anon 30\nfile 500\ninactive_file 300\nactive_file 90\n",
            },
            490,
        ),
        (  # version 1: those of the groups below, too
            "4:memory:/m\n3:cpu:/c\n",
            {
                "memory/m/memory.limit_in_bytes": "900\n",
                "memory/m/memory.usage_in_bytes": "800\n",
                "memory/m/memory.stat": "active_file 1\ntotal_active_file 50\n",
            },
            150,
        ),
    ],
)
def test_memory_that_is_left_is_the_control_groups(tmp_path, own, files, left):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = machine.available_memory(tmp_path, own)
    assert found == left if left is not None else found > 1 << 20


# ---- selftest ------------------------------------------------------------------------


def test_selftest_passes_on_every_usable_backend():
    done = run("selftest")
    assert (done.returncode, done.stderr) == (0, "")
    usable = {b["name"] for b in trainfast.backends() if b["usable"]}
    tested = {line.split()[1] for line in done.stdout.splitlines()[3:-1]}
    assert tested == usable
    assert done.stdout.endswith("\nall fine\n")


def test_selftest_json_has_every_row():
    done = run("selftest", "--json", "--backend", "scalar")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["ok"] is True
    assert {row["backend"] for row in found["rows"]} == {"scalar"}
    assert {"float32", "float64", "float16", "bfloat16"} <= {
        row["dtype"] for row in found["rows"]
    }
    for row in found["rows"]:
        assert row["ok"] is None or 0 <= row["error"] <= row["allowed"]


def test_selftest_exits_with_1_when_a_kernel_is_wrong():
    done = run(
        code="import sys, trainfast; right = trainfast.numpy.adamw_step\n"
        "def wrong(*lists, lr, **rest): right(*lists, lr=lr * 1.001, **rest)\n"
        "trainfast.numpy.adamw_step = wrong\n"
        "from trainfast.cli import main\n"
        "sys.exit(main(['selftest', '--backend', 'scalar']))"
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "FAILED" in done.stdout and "all fine" not in done.stdout


@pytest.mark.parametrize("damage", ["forgets", "nan", "ignores_found_inf", "raises"])
def test_selftest_finds_a_damaged_kernel(monkeypatch, damage):
    right = trainfast.numpy.adamw_step

    def wrong(params, *rest, found_inf=None, **options):
        if damage == "forgets":  # the last element of every parameter
            kept = [array[-1:].copy() for array in params]
            right(params, *rest, found_inf=found_inf, **options)
            for array, last in zip(params, kept, strict=True):
                array[-1:] = last
        elif damage == "nan":
            right(params, *rest, found_inf=found_inf, **options)
            params[3][0] = np.nan
        elif damage == "ignores_found_inf":
            right(params, *rest, **options)
        else:
            raise RuntimeError("out of order")

    monkeypatch.setattr(trainfast.numpy, "adamw_step", wrong)
    report = selftest.selftest(["scalar"])
    assert not report.ok
    assert any(row.ok is False and row.dtype == "float32" for row in report.rows)
    json.loads(report.to_json(), parse_constant=pytest.fail)  # NaN is not JSON


@pytest.mark.parametrize("dtypes", selftest.ADAMW_DTYPES, ids="-".join)
def test_selftest_measures_torchs_arrays_as_numpys(dtypes):
    pytest.importorskip("torch")
    errors = [
        selftest.check_adamw(dtypes, arrays)
        for arrays in (selftest.TorchArrays("cpu"), selftest.NumpyArrays())
        if arrays.has(dtypes[0]) and arrays.has(dtypes[1])
    ]
    assert len(set(errors)) == 1


def halve(options, name):
    return {**options, name: options[name] / 2} if name in options else options


# What a wrong kernel would do to the options of a call, and which of the two has it.
ATTENTION_DAMAGES = {
    "scale": ("both", lambda o: {**o, "scale": (o.get("scale") or 0.25) * 1.01}),
    "mask": ("both", lambda o: {**o, "mask": None}),
    "bias": ("both", lambda o: halve(o, "bias")),
    "softcap": ("both", lambda o: halve(o, "softcap")),
    "causal": ("both", lambda o: {**o, "is_causal": False}),
    "diagonal": ("both", lambda o: {**o, "causal_align": "upper_left"}),
    "window_size": ("both", lambda o: {**o, "window_size": None}),
    "slopes": ("both", lambda o: halve(o, "alibi_slopes")),
    "sinks": ("both", lambda o: halve(o, "sinks")),
    "no dropout": ("both", lambda o: {**o, "dropout_p": 0.0}),
    "another seed": ("both", lambda o: {**o, "seed": 1}),
    "lengths": ("both", lambda o: {**o, "kv_lens": None}),
    "no dlse": ("backward", lambda o: {**o, "dlse": None}),
}


def damaged(right, change):
    return lambda *arrays, **options: right(*arrays, **change(options))


@pytest.mark.parametrize("damage", ATTENTION_DAMAGES)
def test_selftest_finds_damaged_attention(monkeypatch, damage):
    kernels, change = ATTENTION_DAMAGES[damage]
    checks = {"attention_backward": selftest.check_attention_backward}
    if kernels == "both":
        checks["attention"] = selftest.check_attention

    for name, check in checks.items():
        with monkeypatch.context() as patch:
            right = getattr(trainfast.numpy, name)
            patch.setattr(trainfast.numpy, name, damaged(right, change))
            for dtype in ("float32", "float64"):
                error, allowed = check((dtype,), selftest.NumpyArrays())
                assert error > allowed


@pytest.mark.parametrize("name", ["attention", "attention_backward"])
def test_selftest_finds_nan_from_attention(monkeypatch, name):
    right = getattr(trainfast.numpy, name)

    def wrong(*arrays, **options):
        results = right(*arrays, **options)
        results[1][..., -1:] = np.nan  # lse, or dk
        return results

    monkeypatch.setattr(trainfast.numpy, name, wrong)
    report = selftest.selftest(["scalar"])
    assert not report.ok
    json.loads(report.to_json(), parse_constant=pytest.fail)


def test_selftest_fails_where_a_kernel_refuses(monkeypatch):
    def refuse(*arrays, **options):
        raise NotImplementedError("q must be of a float dtype, got float32")

    monkeypatch.setattr(trainfast.numpy, "attention", refuse)
    assert not selftest.selftest(["scalar"]).ok


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["norm", "finds nothing", "factor", "growth"])
def test_selftest_finds_damaged_amp(monkeypatch, damage):
    name = "amp_update" if damage == "growth" else "amp_grads"
    right = getattr(trainfast._core, name)

    def wrong(first, *rest, **options):
        if damage == "norm":
            options["norm_type"] = 2.0
        if damage == "factor":
            options["factor"] = options["factor"] * 1.01
        if damage == "growth":
            options["growth_interval"] = 4
        result = right(first, *rest, **options)
        if damage == "finds nothing":
            options["found_inf"][...] = 0
        return result

    monkeypatch.setattr(trainfast._core, name, wrong)
    rows = selftest.selftest(["scalar"]).rows
    dtypes = {row.dtype for row in rows if row.ok is False and row.kernel == name}
    assert dtypes == (
        {"float32"} if damage == "growth" else {name for (name,) in selftest.AMP_DTYPES}
    )


@pytest.mark.parametrize("dtypes", selftest.ATTENTION_DTYPES, ids="-".join)
def test_selftest_measures_other_kernels_on_torchs_arrays_as_on_numpys(dtypes):
    pytest.importorskip("torch")
    for check in (
        selftest.check_amp_grads,
        selftest.check_amp_update,
        selftest.check_attention,
        selftest.check_attention_backward,
    ):
        errors = [
            check(dtypes, arrays)
            for arrays in (selftest.TorchArrays("cpu"), selftest.NumpyArrays())
            if arrays.has(dtypes[0])
        ]
        assert len(set(errors)) == 1


def test_selftest_fails_for_a_named_backend_that_cannot_run(monkeypatch):
    def refuse(name):
        if name == "avx512":
            raise ValueError("backend avx512 cannot run here: no such CPU")

    monkeypatch.setattr(trainfast, "use_backend", refuse)
    (row,) = selftest.selftest(["avx512"]).rows
    assert row.ok is False and "no such CPU" in row.note


@pytest.mark.parametrize("forced", [None, "scalar"])
def test_selftest_brings_back_the_backend_in_use(forced):
    trainfast.use_backend(forced)
    try:
        before = trainfast.backends()
        selftest.selftest(["wide"])
        assert trainfast.backends() == before
    finally:
        trainfast.use_backend(None)
