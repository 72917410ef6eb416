"""The registry: laziness, four sources of a name, collisions, messages, threads."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from visual_grpo import registry as registry_module
from visual_grpo.errors import UnknownNameError, UserError, did_you_mean
from visual_grpo.registry import ADAPTERS, EVALS, METHODS, RECIPES, REWARDS, Registry, load_object

BUILT_IN = {"rewards": REWARDS, "methods": METHODS, "models": ADAPTERS, "evals": EVALS, "recipes": RECIPES}


def module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(textwrap.dedent(text))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def with_table(path: Path, name: str, rows: str, **options: str) -> Registry[object]:
    module(path, name, f"TABLE = {rows}")
    return Registry("colour", builtin_module=f"{name}:TABLE", **options)


def test_the_decorator_returns_the_object_and_takes_the_docstring() -> None:
    colours = Registry[object]("colour")

    @colours.register("blue")
    def blue() -> None:
        """The sky.

        More.
        """

    assert colours.get("blue") is blue
    assert colours.summary("blue") == "The sky."
    assert colours.origin("blue").partition(":")[0] == __file__
    assert "blue" in colours
    assert "red" not in colours
    assert colours.names() == ["blue"]


def test_a_table_is_listed_without_importing_what_it_names(path: Path) -> None:
    module(path, "vg_test_boom", "raise RuntimeError('imported')")
    colours = with_table(path, "vg_test_table", "{'red': ('vg_test_boom:Red', 'Warm.')}")
    assert colours.names() == ["red"]
    assert colours.summary("red") == "Warm."
    assert colours.origin("red") == "built-in"
    assert colours.target("red") == "vg_test_boom:Red"
    assert "vg_test_boom" not in sys.modules
    with pytest.raises(UserError, match=r"vg_test_boom:Red.*RuntimeError: imported"):
        colours.get("red")


def test_a_table_row_and_its_own_decorator_agree(path: Path) -> None:
    module(path, "vg_test_red", "import vg_test_hub\n@vg_test_hub.colours.register('red')\nclass Red: pass")
    hub_text = (
        "from visual_grpo.registry import Registry\ncolours = Registry('colour', builtin_module='vg_test_rows:TABLE')"
    )
    module(path, "vg_test_hub", hub_text)
    module(path, "vg_test_rows", "TABLE = {'red': ('vg_test_red:Red', 'Warm.')}")
    hub = load_object("vg_test_hub:colours")
    assert hub.get("red").__name__ == "Red"
    assert hub.get("red") is hub.get("red")
    assert hub.summary("red") == "Warm."
    assert hub.names() == ["red"]


def test_a_table_row_that_names_another_class_than_the_decorator_is_an_error(path: Path) -> None:
    module(path, "vg_test_rows2", "TABLE = {'red': ('vg_test_red2:Crimson', '')}")
    module(path, "vg_test_red2", "class Crimson: pass")
    colours = Registry[object]("colour", builtin_module="vg_test_rows2:TABLE")
    with pytest.raises(UserError, match=r"'red' is held twice: by 'vg_test_red2:Crimson' \(built-in\) and "):

        @colours.register("red")
        class Red: ...


def test_a_name_registered_twice_is_an_error_naming_both() -> None:
    colours = Registry[object]("colour")

    @colours.register("blue")
    def first() -> None: ...

    with pytest.raises(UserError, match=r"held twice.*first.*and.*second.*Rename") as error:

        @colours.register("blue")
        def second() -> None: ...

    assert str(error.value).count(f"{__file__}:") == 2
    assert colours.get("blue") is first


def test_a_function_defined_again_in_its_module_replaces_the_first() -> None:
    colours = Registry[object]("colour")
    for _ in range(2):  # a notebook cell that is run again
        scope: dict[str, object] = {"__name__": "notebook", "colours": colours}
        exec("@colours.register('blue')\ndef blue(): ...", scope)
        assert colours.get("blue") is scope["blue"]


@pytest.mark.parametrize("name", ["", " blue", "a:b", 3])
def test_an_impossible_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="needs a name"):
        Registry[object]("colour").register(name)


def test_an_unknown_name_says_what_is_near_and_known() -> None:
    colours = Registry[object]("colour")
    colours.register("pickscore", summary="x")(object)
    with pytest.raises(UnknownNameError) as error:
        colours.get("pick_scor")
    assert str(error.value) == (
        "no colour named 'pick_scor'. Did you mean 'pickscore'? Known: pickscore. "
        "To use your own, give 'package.module:Name' in place of the name."
    )
    assert error.value.exit_status == 2
    for call in (colours.summary, colours.origin, colours.target):
        with pytest.raises(UnknownNameError):
            call("pick_scor")


def test_package_module_name(path: Path) -> None:
    module(path, "vg_test_own", "class Mine:\n    class Inner: pass")
    assert REWARDS.get("vg_test_own:Mine").__name__ == "Mine"
    assert REWARDS.get("vg_test_own:Mine.Inner").__name__ == "Inner"
    assert REWARDS.target("vg_test_own:Mine") == "vg_test_own:Mine"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("vg_no_such_module:X", "there is no module 'vg_no_such_module'"),
        ("json.vg_nothing:X", "there is no module 'json.vg_nothing'"),
        ("json:dumpz", "json has no 'dumpz'. Did you mean 'dump'"),
        (":X", "not of the form"),
        ("json:", "not of the form"),
    ],
)
def test_a_wrong_target_says_which_part_is_wrong(target: str, message: str) -> None:
    with pytest.raises(UserError, match="^.*" + message.replace(".", r"\.")):
        REWARDS.get(target)


def test_a_dependency_missing_inside_a_module_is_named(path: Path) -> None:
    module(path, "vg_test_needs", "import vg_absent_engine")
    with pytest.raises(UserError, match="No module named 'vg_absent_engine'"):
        load_object("vg_test_needs:X")


def distribution(folder: Path, name: str, group: str, rows: dict[str, str]) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in rows.items())
    )


def test_entry_points_are_found_and_lazy(path: Path) -> None:
    distribution(path, "paint-shop", "vg_test.colours", {"teal": "vg_test_teal:Teal"})
    module(path, "vg_test_teal", "class Teal:\n    '''Green-blue.'''")
    colours = Registry[object]("colour", entry_points="vg_test.colours")
    assert colours.names() == ["teal"]
    assert colours.origin("teal") == "distribution paint-shop"
    assert colours.summary("teal") == "from distribution paint-shop"
    assert "vg_test_teal" not in sys.modules
    assert getattr(colours.get("teal"), "__name__", "") == "Teal"


def test_a_name_of_two_distributions_is_an_error_naming_both_and_hides_no_other(path: Path) -> None:
    distribution(path, "one", "vg_test.twice", {"teal": "one:Teal", "pink": "json:loads"})
    distribution(path, "two", "vg_test.twice", {"teal": "two:Teal"})
    colours = Registry[object]("colour", entry_points="vg_test.twice")
    assert colours.names() == ["pink", "teal"]
    assert callable(colours.get("pink"))
    both = r"'teal' is held twice.*'one:Teal' \(distribution one\) and 'two:Teal' \(distribution two\)"
    with pytest.raises(UserError, match=both):
        colours.get("teal")


def test_refresh_sees_a_distribution_installed_since(path: Path) -> None:
    colours = Registry[object]("colour", entry_points="vg_test.later")
    assert colours.names() == []
    distribution(path, "later", "vg_test.later", {"teal": "json:loads"})
    assert colours.names() == []
    colours.refresh()
    assert colours.names() == ["teal"]


def test_many_threads_get_one_object(path: Path) -> None:
    module(path, "vg_test_slow", "import time\ntime.sleep(0.2)\nclass Slow: pass")
    colours = with_table(path, "vg_test_slow_table", "{'slow': ('vg_test_slow:Slow', '')}")
    found: list[object] = []
    barrier = threading.Barrier(8)

    def look_up() -> None:
        barrier.wait()
        found.append(colours.get("slow"))

    threads = [threading.Thread(target=look_up) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(found) == 8
    assert len({id(value) for value in found}) == 1


def test_no_deadlock_between_an_import_that_registers_and_a_lookup_that_imports(path: Path) -> None:
    script = """
        import threading, sys
        sys.path.insert(0, {path!r})
        from visual_grpo.registry import REWARDS
        def direct(): import vg_test_cross
        def by_name(): REWARDS.get("vg_test_cross:Cross")
        threads = [threading.Thread(target=f, daemon=True) for f in (direct, by_name) * 4]
        [t.start() for t in threads]; [t.join(20) for t in threads]
        sys.exit(any(t.is_alive() for t in threads) or "cross" not in REWARDS.names())
    """
    module(
        path,
        "vg_test_cross",
        "import time\nfrom visual_grpo.registry import REWARDS\ntime.sleep(0.3)\n@REWARDS.register('cross')\nclass Cross: pass",
    )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script.format(path=str(path)))], timeout=60, check=False
    )
    assert done.returncode == 0


@given(name=st.text(max_size=12), known=st.lists(st.text(min_size=1, max_size=12), max_size=6))
def test_did_you_mean_names_a_known_name_or_nothing(name: str, known: list[str]) -> None:
    hint = did_you_mean(name, known)
    assert hint == "" or any(hint == f" Did you mean {candidate!r}?" for candidate in known)
    for candidate in known:
        assert did_you_mean(candidate, [candidate]) == f" Did you mean {candidate!r}?"


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_built_in_has_a_summary_of_one_line(kind: str) -> None:
    for name in BUILT_IN[kind].names():
        summary = BUILT_IN[kind].summary(name)
        assert summary.strip() == summary
        assert summary
        assert "\n" not in summary
        assert len(summary) <= 160, f"{kind} {name}: the summary is too long for a list"


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in BUILT_IN.items() for name in names.names()])
def test_every_built_in_loads_and_its_decorator_agrees_with_its_table_row(kind: str, name: str) -> None:
    assert callable(BUILT_IN[kind].get(name))


def test_the_registries_are_of_the_documented_groups() -> None:
    groups = {names._group for names in BUILT_IN.values()}
    assert groups == {f"visual_grpo.{kind}" for kind in ("rewards", "methods", "adapters", "evals", "recipes")}
    assert set(registry_module.__all__) >= {"REWARDS", "METHODS", "ADAPTERS", "EVALS", "RECIPES"}
