"""The reading order is the import order: no file needs one that comes later."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

MAY_IMPORT = {
    "schedules": set(), "mup": set(), "moe": set(), "model": {"mup", "moe"}, "data": set(), "eval": {"model", "data"},
    "train": {"schedules", "mup", "model", "data", "eval"}, "sweep": {"train"}, "fit": {"schedules"},
}  # fmt: skip
THIRD_PARTY = {"torch", "numpy", "tiktoken", "matplotlib", "tqdm", "safetensors", "datasets"}


def imports(nodes) -> set[str]:
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names


def test_files_import_only_what_the_reader_has_read():
    files = {path.stem: ast.parse(path.read_text()) for path in ROOT.glob("*.py")}
    assert set(files) <= set(MAY_IMPORT), "a new top-level file needs a place in the reading order"
    for name, tree in files.items():
        assert imports(tree.body) & set(MAY_IMPORT) <= MAY_IMPORT[name], name


def test_dependencies_are_the_ones_we_list():
    import sys

    used = set()
    for path in ROOT.glob("*.py"):
        used |= imports(ast.walk(ast.parse(path.read_text()))) - set(sys.stdlib_module_names) - set(MAY_IMPORT)
    used -= {"datasets", "pyarrow"}  # optional: for data that is not in local files, or in other formats
    listed = set(re.findall(r"^(\w+)==", (ROOT / "requirements.txt").read_text(), re.M))
    assert used == listed <= THIRD_PARTY


def test_every_file_runs_by_itself_and_says_how():
    for path in ROOT.glob("*.py"):
        tree = ast.parse(path.read_text())
        mains = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
        assert len(mains) == 1 and ast.unparse(mains[0].args).startswith("argv") and ast.unparse(mains[0].returns) == "int"
        assert f"python {path.name}" in ast.get_docstring(tree), f"{path.name}: the docstring shows the command"


def test_schedules_need_no_torch():
    import subprocess
    import sys

    code = "import sys, schedules; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
