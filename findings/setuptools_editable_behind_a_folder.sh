#!/usr/bin/env bash
# setuptools 84.2.1: a script beside a clone that has the name of its package does not find the
# package, although it is installed from this clone in editable mode.
# Guess: an installed package goes before a folder that has no __init__.py.
# Seen: the editable finder stands behind the one of sys.path, so the clone's folder wins as a
# namespace package, and the import fails with "(unknown location)". With the package below src/,
# or package-dir {"" = "."}, the installation is a path, and the import works.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip="$folder/venv/bin/pip --quiet --disable-pip-version-check"
$pip install setuptools==84.2.1 wheel==0.45.1
mkdir -p "$folder/shapes/shapes" "$folder/shapes/other"
echo "class Circle: pass" > "$folder/shapes/shapes/__init__.py"
touch "$folder/shapes/other/__init__.py"
echo "from shapes import Circle; print('imported')" > "$folder/script.py"
project() {
  printf '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
  printf '[project]\nname = "shapes"\nversion = "1"\n[tool.setuptools]\n'
  printf 'packages = ["shapes", "other"]\n%s\n' "$1"
}
try() {
  project "$1" > "$folder/shapes/pyproject.toml"
  $pip install --no-build-isolation --no-deps -e "$folder/shapes"
  (cd "$folder" && venv/bin/python script.py 2>&1 | tail -n 1) || true
}
flat=$(try "")
path=$(try 'package-dir = {"" = "."}')
echo "flat: $flat"
echo "with a package-dir: $path"
[[ $flat == *"cannot import name 'Circle' from 'shapes' (unknown location)"* ]]
[[ $path == imported ]]
