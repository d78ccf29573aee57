"""patch and unpatch: on stand-in modules, and on torch's own names."""

import importlib.util
import json
import pickle
import random
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest

import trainfast
from trainfast.patching import registry as patching

OLD = "shop.tools.Hammer"


class Hammer:
    """What the package `shop` offers."""


class FastHammer(Hammer):
    """What takes its place."""


def add_module(monkeypatch, name, **names):
    module = ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(patching, "_registry", {})
    monkeypatch.setattr(patching, "_active", {})
    monkeypatch.setattr(patching, "_blocks", Counter())
    # This file's own globals are names like any other: they must not count here.
    monkeypatch.setitem(sys.modules, __name__, None)


@pytest.fixture
def shop(monkeypatch, registry):
    """A package whose public name is `shop.tools.Hammer`, defined in shop.impl."""
    add_module(monkeypatch, "shop")
    add_module(monkeypatch, "shop.impl", Hammer=Hammer)
    add_module(monkeypatch, "fastshop", Hammer=FastHammer)
    patching.register("hammer", [("shop.tools.Hammer", "fastshop.Hammer")])
    return add_module(monkeypatch, "shop.tools", Hammer=Hammer)


@pytest.fixture
def user(monkeypatch):
    """A module that has already done `from shop.tools import Hammer as H`."""
    return add_module(monkeypatch, "user", H=Hammer, other=1)


def namespaces():
    # Hypothesis notes in a global of its own when the garbage collector runs.
    modules = [m for m in sys.modules.values() if type(m) is ModuleType]
    modules = [m for m in modules if not m.__name__.startswith("hypothesis.")]
    return {id(module): dict(vars(module)) for module in modules}


# ---- Where it reaches ----------------------------------------------------------------


def test_patch_rebinds_the_name_and_what_was_imported_from_it(shop, user):
    report = trainfast.patch("hammer")
    assert shop.Hammer is user.H is FastHammer
    assert user.other == 1
    (change,) = report.changes
    assert change.name == "hammer"
    assert (change.old, change.new) == ("shop.tools.Hammer", "fastshop.Hammer")
    assert change.places == ["shop.tools.Hammer", "user.H"]


def test_patch_without_names_takes_all_registered(shop, user, monkeypatch):
    add_module(monkeypatch, "shop.nails", nail="slow")
    add_module(monkeypatch, "fastshop.nails", nail="fast")
    patching.register("nail", [("shop.nails.nail", "fastshop.nails.nail")])
    assert {c.name for c in trainfast.patch().changes} == {"hammer", "nail"}
    assert sys.modules["shop.nails"].nail == "fast"


def test_import_order_does_not_matter(shop, monkeypatch):
    before = add_module(monkeypatch, "before", Hammer=shop.Hammer)
    trainfast.patch("hammer")
    after = add_module(monkeypatch, "after", Hammer=shop.Hammer)
    assert before.Hammer is after.Hammer is FastHammer
    trainfast.unpatch("hammer")
    assert before.Hammer is after.Hammer is Hammer


def test_patch_leaves_the_owners_other_modules_alone(shop, monkeypatch):
    inside = add_module(monkeypatch, "shop.other", Hammer=Hammer)
    outside = add_module(monkeypatch, "shopping", Hammer=Hammer)
    trainfast.patch("hammer")
    assert sys.modules["shop.impl"].Hammer is inside.Hammer is Hammer
    assert outside.Hammer is FastHammer


def test_patch_leaves_trainfasts_own_modules_alone(shop, monkeypatch):
    own = add_module(monkeypatch, "trainfast.something", Hammer=Hammer)
    trainfast.patch("hammer")
    assert own.Hammer is Hammer


def test_patch_leaves_instances_and_subclasses_alone(shop):
    class Mine(shop.Hammer):
        pass

    tool = shop.Hammer()
    trainfast.patch("hammer")
    assert Mine.__mro__ == (Mine, Hammer, object)
    assert type(tool) is Hammer


def test_patch_wakes_no_lazy_module(shop, monkeypatch, tmp_path):
    class Touchy(ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(f"touched {name}")

        __dict__ = property(lambda self: 1 / 0)

    monkeypatch.setitem(sys.modules, "touchy", Touchy("touchy"))
    monkeypatch.setitem(sys.modules, "no_module", object())
    (tmp_path / "sleeper.py").write_text("raise AssertionError('woken')")
    spec = importlib.util.spec_from_file_location("sleeper", tmp_path / "sleeper.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    sleeper = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sleeper", sleeper)
    spec.loader.exec_module(sleeper)

    trainfast.patch("hammer")
    trainfast.unpatch("hammer")
    with pytest.raises(AssertionError, match="woken"):
        _ = sleeper.anything  # it was still asleep


def test_a_module_with_two_names_is_touched_once(shop, user, monkeypatch):
    monkeypatch.setitem(sys.modules, "user_again", user)
    assert trainfast.patch("hammer").changes[0].places[1:] == ["user.H"]
    assert trainfast.unpatch("hammer").changes[0].left == []


# ---- Taking it back ------------------------------------------------------------------


def test_unpatch_restores_everything_exactly(shop, user):
    before = namespaces()
    trainfast.patch("hammer")
    assert namespaces() != before
    report = trainfast.unpatch()
    assert namespaces() == before
    assert report.changes[0].places == ["shop.tools.Hammer", "user.H"]
    assert report.changes[0].left == []


def test_patching_twice_is_patching_once(shop, user):
    before = namespaces()
    trainfast.patch("hammer")
    patched = namespaces()
    assert trainfast.patch("hammer", "hammer").changes[0].places == []
    assert namespaces() == patched
    trainfast.unpatch("hammer")
    assert namespaces() == before


def test_patching_again_finds_what_went_around_the_first(shop, monkeypatch):
    trainfast.patch("hammer")
    late = add_module(monkeypatch, "late", Hammer=sys.modules["shop.impl"].Hammer)
    assert trainfast.patch("hammer").changes[0].places == ["late.Hammer"]
    trainfast.unpatch("hammer")
    assert late.Hammer is Hammer


def test_unpatch_of_what_is_not_patched_changes_nothing(shop, user):
    before = namespaces()
    assert trainfast.unpatch("hammer").changes == []
    assert trainfast.unpatch().changes == []
    assert namespaces() == before


def test_unpatch_leaves_what_the_user_rebound_and_says_so(shop, user):
    trainfast.patch("hammer")
    user.H = "mine"
    report = trainfast.unpatch("hammer")
    assert user.H == "mine"
    assert shop.Hammer is Hammer
    assert report.changes[0].left == ["user.H"]
    assert "left alone" in str(report) and "user.H" in str(report)


def test_unpatch_survives_a_deleted_name(shop, user):
    trainfast.patch("hammer")
    del user.H
    assert trainfast.unpatch("hammer").changes[0].left == ["user.H"]
    assert not hasattr(user, "H")


def test_unpatch_leaves_replacements_imported_before_patch(shop, monkeypatch):
    fan = add_module(monkeypatch, "fan", Hammer=FastHammer)
    trainfast.patch("hammer")
    trainfast.unpatch("hammer")
    assert fan.Hammer is sys.modules["fastshop"].Hammer is FastHammer


def test_patched_block_ends_with_the_block(shop, user):
    before = namespaces()
    with trainfast.patch("hammer") as report:
        assert shop.Hammer is user.H is FastHammer
        assert report.changes[0].places == ["shop.tools.Hammer", "user.H"]
    assert namespaces() == before


def test_patched_block_ends_with_an_exception(shop):
    with pytest.raises(ZeroDivisionError), trainfast.patch():
        assert shop.Hammer is FastHammer
        _ = 1 / 0
    assert shop.Hammer is Hammer


def test_patched_blocks_nest(shop):
    with trainfast.patch("hammer"):
        with trainfast.patch("hammer"):
            assert shop.Hammer is FastHammer
        assert shop.Hammer is FastHammer
    assert shop.Hammer is Hammer


def test_is_patched_says_what_is_in_force(shop):
    assert not trainfast.is_patched("hammer")
    with trainfast.patch("hammer"):
        assert trainfast.is_patched("hammer")
    assert not trainfast.is_patched("hammer")
    trainfast.patch()
    assert trainfast.is_patched("hammer")


def test_patched_block_begins_where_another_threads_ends(shop):
    """patch() found it in force, and it was gone when the block began."""
    with trainfast.patch("hammer"):
        later = trainfast.patch("hammer")
    assert shop.Hammer is Hammer
    with later:
        assert shop.Hammer is FastHammer
    assert shop.Hammer is Hammer


def test_patched_block_within_patch_keeps_it(shop):
    trainfast.patch()
    with trainfast.patch():
        pass
    assert shop.Hammer is FastHammer


# ---- Threads -------------------------------------------------------------------------


def test_patched_block_holds_until_that_of_the_last_thread_ends(shop):
    entered, left = threading.Event(), threading.Event()

    def other():
        with trainfast.patch("hammer"):
            entered.set()
            left.wait()
            return shop.Hammer

    with ThreadPoolExecutor(1) as pool:
        with trainfast.patch("hammer"):
            seen = pool.submit(other)
            entered.wait()
        left.set()
        assert seen.result() is FastHammer
    assert shop.Hammer is Hammer


@pytest.mark.slow
def test_threads_that_patch_and_call_at_once_leave_what_they_found(shop, user):
    before = namespaces()
    done = threading.Event()

    def change(seed):
        chance = random.Random(seed)
        for _ in range(20):
            how = chance.choice(["patch", "unpatch", "block"])
            if how == "block":
                with trainfast.patch("hammer"):
                    pass
            else:
                getattr(trainfast, how)("hammer")

    def call():
        seen = set()
        while not done.is_set():
            seen |= {type(shop.Hammer()), type(user.H())}
        return seen

    with ThreadPoolExecutor(4) as pool:
        calls = pool.submit(call)
        changes = [pool.submit(change, seed) for seed in range(3)]
        try:
            for each in changes:
                each.result()
        finally:
            done.set()
        assert calls.result() <= {Hammer, FastHammer}
    trainfast.unpatch()
    assert namespaces() == before


# ---- Settings ------------------------------------------------------------------------


@pytest.fixture
def switch(shop, monkeypatch):
    """A setting of the shop, "on"; patch("light") makes it "off"."""
    state = ["on"]
    module = add_module(
        monkeypatch,
        "shop.light",
        get=lambda: state[0],
        put=lambda x: state.insert(0, x),
    )
    patching.register(
        "light", [], settings=[("shop.light.get", "shop.light.put", "off")]
    )
    return module


def test_patch_makes_a_setting_and_unpatch_takes_it_back(switch):
    report = trainfast.patch("light")
    assert switch.get() == "off"
    change = report.changes[0]
    assert (change.old, change.new) == ("shop.light.get()", "'off'")
    assert change.places == ["shop.light.get()"]
    assert trainfast.patch("light").changes[0].places == []
    assert trainfast.unpatch("light").changes[0].places == ["shop.light.get()"]
    assert switch.get() == "on"


def test_unpatch_leaves_a_setting_that_has_another_value_by_now(switch):
    trainfast.patch("light")
    switch.put("dim")
    assert trainfast.unpatch("light").changes[0].left == ["shop.light.get()"]
    assert switch.get() == "dim"


def test_a_setting_that_was_so_before_stays_so(switch):
    switch.put("off")
    with trainfast.patch("light"):
        pass
    assert switch.get() == "off"


# ---- Errors and reports --------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: trainfast.patch("hammer", "saw"),
        lambda: trainfast.unpatch("hammer", "saw"),
        lambda: trainfast.is_patched("saw"),
    ],
)
def test_unknown_name_is_an_error_that_lists_the_known(shop, call):
    with pytest.raises(ValueError, match=r"^name must be one of hammer, got 'saw'$"):
        call()
    assert shop.Hammer is Hammer


@pytest.mark.parametrize("old", ["shop.tools.Saw", "shop.saws.Saw"])
def test_a_missing_target_is_skipped_and_the_report_says_so(shop, old):
    patching.register("saw", [(old, "fastshop.Hammer"), (OLD, "fastshop.Hammer")])
    report = trainfast.patch("saw")
    assert shop.Hammer is FastHammer
    assert [(row.name, row.old) for row in report.skipped] == [("saw", old)]
    assert "skipped, because this version does not have them" in str(report.table())
    assert " skipped: " in str(report)
    assert report.to_dict()["skipped"][0]["old"] == old
    trainfast.unpatch("saw")
    assert shop.Hammer is Hammer


def test_a_missing_setting_is_skipped(shop):
    settings = [("shop.light.get", "shop.light.put", "off")]
    patching.register("saw", [(OLD, "fastshop.Hammer")], settings=settings)
    assert [row.old for row in trainfast.patch("saw").skipped] == ["shop.light.get"]
    assert shop.Hammer is FastHammer


def test_a_setting_by_name_is_made_only_by_name(switch):
    by_name = [("shop.light.get", "shop.light.put", "dim")]
    patching.register("dimmer", [(OLD, "fastshop.Hammer")], by_name=by_name)
    trainfast.unpatch()
    with trainfast.patch():
        trainfast.unpatch("light")
        assert switch.get() == "on"
        trainfast.patch("dimmer")
        assert switch.get() == "dim"
    assert switch.get() == "on"


SOURCES = {
    "from fastshop import Hammer": False,  # that of another package: cannot be told
    "from trainfast.tools import Hammer": True,
    "from trainfast.tools import Saw as Hammer": True,
    "from trainfast.tools import Hammer as Other": False,
    "%matplotlib inline": False,
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("where", ["file", "notebook"])
def test_unpatch_leaves_what_was_imported_from_trainfast(
    shop, monkeypatch, tmp_path, source, where
):
    trainfast.patch("hammer")
    late = add_module(monkeypatch, "late", Hammer=FastHammer)
    if where == "file":
        (tmp_path / "late.py").write_text(source)
        late.__file__ = str(tmp_path / "late.py")
    else:
        late.In = ["", source]
    trainfast.unpatch("hammer")
    assert late.Hammer is (FastHammer if SOURCES[source] else Hammer)


@pytest.mark.parametrize("old", ["closed.Saw"])
def test_a_missing_package_is_an_error_and_changes_nothing(shop, old):
    patching.register("saw", [(old, "fastshop.Hammer")])
    package = old.partition(".")[0]
    with pytest.raises(ImportError, match=f"^{package} must be installed to patch 'sa"):
        trainfast.patch("hammer", "saw")
    assert shop.Hammer is Hammer
    assert patching._active == {}


def test_registering_a_name_twice_is_an_error(shop):
    with pytest.raises(ValueError, match=r"^name must be new, got 'hammer'"):
        patching.register("hammer", [])


def test_report_has_table_html_and_dict(shop, user):
    report = trainfast.patch("hammer")
    assert str(report) == "patched hammer (2 places)"
    assert str(report.table()).splitlines() == [
        "patched",
        "name    old                new              modules touched",
        "------  -----------------  ---------------  -----------------",
        "hammer  shop.tools.Hammer  fastshop.Hammer  shop.tools.Hammer",
        "                                            user.H",
    ]
    assert report._repr_html_() == "<p>patched hammer (2 places)</p>"
    assert report.table()._repr_html_().count("user.H") == 1
    assert json.loads(report.to_json()) == report.to_dict()
    assert report.to_dict()["changes"][0]["places"] == ["shop.tools.Hammer", "user.H"]
    assert str(trainfast.unpatch()) == "restored hammer (2 places)"
    assert str(trainfast.unpatch()) == "restored nothing"


# ---- torch ---------------------------------------------------------------------------


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    yield torch
    trainfast.unpatch()


def test_importing_trainfast_patches_nothing(torch):
    code = (
        "import torch; before = dict(vars(torch.optim)); import trainfast;"
        "import trainfast.torch; assert dict(vars(torch.optim)) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_torch_the_error_says_so():
    code = (
        "import sys; sys.modules['torch'] = None; import trainfast; trainfast.patch()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    message = "ImportError: torch must be installed to patch 'adamw', got: "
    assert message in done.stderr


def test_patch_replaces_both_of_torchs_optimizers(torch, monkeypatch):
    user = add_module(monkeypatch, "user", A=torch.optim.AdamW, B=torch.optim.Adam)
    originals = torch.optim.AdamW, torch.optim.Adam
    with trainfast.patch("adamw"):
        assert torch.optim.AdamW is user.A is trainfast.torch.AdamW
        assert torch.optim.Adam is user.B is trainfast.torch.Adam
        defining = sys.modules["torch.optim.adamw"], sys.modules["torch.optim.adam"]
        assert (defining[0].AdamW, defining[1].Adam) == originals
    assert (torch.optim.AdamW, torch.optim.Adam) == (user.A, user.B) == originals


def test_a_script_that_says_torch_optim_trains_on_the_kernel(torch):
    weight = torch.nn.Parameter(torch.ones(5))
    with trainfast.patch("adamw"):
        optimizer = torch.optim.AdamW([weight], lr=0.1)
    trainfast.reset_stats()
    weight.sum().backward()
    optimizer.step()
    assert (weight < 1).all()
    assert sum(trainfast.stats().calls["adamw"].values()) == 1
    assert trainfast.stats().fallbacks == {}


def test_optimizers_can_be_pickled_across_patch(torch):
    theirs = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    data = pickle.dumps(theirs)
    with trainfast.patch("adamw"):
        assert type(pickle.loads(data)) is type(pickle.loads(pickle.dumps(theirs)))
        assert type(pickle.loads(data)) is type(theirs)
        ours = pickle.dumps(torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))
        assert type(pickle.loads(ours)) is trainfast.torch.AdamW
    assert type(pickle.loads(ours)) is type(theirs)  # as where trainfast is missing


def test_torchs_own_adamw_still_steps_while_patched(torch):
    weight = torch.nn.Parameter(torch.ones(5))
    theirs = torch.optim.AdamW([weight], lr=0.1)
    trainfast.reset_stats()
    with trainfast.patch("adamw"):
        weight.sum().backward()
        theirs.step()
    assert (weight < 1).all()
    assert trainfast.stats().calls == {}
