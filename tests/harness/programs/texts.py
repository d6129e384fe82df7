"""What a person reads in this repository: documents and code, for tests that read them."""

from harness.paths import ROOT

PACKAGES = ("nanocp", "control_plane", "data_plane")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "proto", "deploy", "docs", "models", ".ci", ".github")
_SUFFIXES = {".py", ".md", ".proto", ".cpp", ".h", ".html", ".yaml", ".yml", ".toml", ".txt", ""}

TEXTS = [
    path
    for folder in (ROOT, *(ROOT / name for name in FOLDERS))
    for path in sorted(folder.glob("*") if folder == ROOT else folder.rglob("*"))
    if path.is_file() and path.suffix in _SUFFIXES and "wire/v1" not in path.as_posix()
]
DOCUMENTS = [path for path in TEXTS if path.suffix == ".md"]
