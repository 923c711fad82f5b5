"""Workers whose flags, code or config differ from the chief's."""

import importlib
import sys

import pytest
from ddl.run.checks.code_digest import user_code_digests
from ddl.run.checks.same_on_all_workers import check_same_on_all

from ddl.errors import ConfigError


class TwoWorkers:
    """The chief, and another one whose text differs as `change` says."""

    number = 2

    def __init__(self, change):
        self.change = change
        self.barriers = 0

    def barrier(self):
        self.barriers += 1

    def gather_texts(self, text):
        return [text, self.change(text)]


def test_flags_that_decide_what_they_do_together_are_compared():
    flags = {"mode": "train", "dry_run": False}
    check_same_on_all(TwoWorkers(lambda text: text), flags)
    other = TwoWorkers(lambda text: text.replace("--mode=train", "--mode=eval"))
    with pytest.raises(ConfigError) as raised:
        check_same_on_all(other, flags)
    assert other.barriers == 1  # none ends while another still waits for the texts
    first, *differences, last = str(raised.value).splitlines()
    assert first == "Worker 1 must have the code, versions, config and flags of worker 0, got"
    assert last == "Start all workers with the same ones."
    assert sorted(differences) == ["  worker 0: --mode=train", "  worker 1: --mode=eval"]


def test_the_code_compared_is_all_that_the_config_imports(tmp_path, monkeypatch):
    """A package as a whole, and the modules beside a single file."""
    code = {
        "single_of_test.py": "import beside_of_test",
        "beside_of_test.py": "",
        "unused_of_test.py": "",
        "package_of_test/__init__.py": "",
        "package_of_test/model.py": "",
        "package_of_test/late.py": "",
        "plain_of_test/folder.py": "",
    }
    for name, text in code.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    names = "single_of_test", "package_of_test.model", "plain_of_test.folder", "ddl.tasks"
    for name in names[:3]:
        importlib.import_module(name)
    try:
        before = user_code_digests(names)
        for name in names[:3]:
            assert user_code_digests([name]) == before  # all lie beside it
        found = {line.partition(",")[0] for line in before}
        assert found == {f"{name}_of_test" for name in ("single", "beside", "package", "plain")}
        for changed in code:
            (tmp_path / changed).write_text("A = 1")
            after = user_code_digests(names)
            own = changed.partition("/")[0].removesuffix(".py")
            differing = {line.partition(",")[0] for line in {*before} ^ {*after}}
            assert differing == {own} - {"unused_of_test"}
            before = after
    finally:
        for name in [name for name in sys.modules if "_of_test" in name]:
            del sys.modules[name]
