#!/usr/bin/env bash
# Packs what a GPU machine without a network lacks: packages.txt, for Python 3.12 on x86-64 Linux, into one archive.
#
#     benchmarks/gpu/bundle.sh [FILE]      # default: .gpu/site.tar.xz
#
# Copy the checkout and the archive to that machine and start benchmarks/gpu/run.sh there. Needs `make setup` and xz.
# Without Ray's Java classes, its RLlib and the pages of its dashboard, archive and checkout stay below 60 MiB together.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
file=${1:-.gpu/site.tar.xz}
limit=$((60 << 20))

[ -x .venv/bin/uv ] || { echo "bundle.sh needs .venv with uv; run 'make setup'" >&2; exit 2; }
command -v xz >/dev/null || { echo "bundle.sh needs xz; install it (Debian, Ubuntu: apt install xz-utils)" >&2; exit 2; }
mkdir -p "$(dirname "$file")"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT

UV_FIND_LINKS=${UV_FIND_LINKS:-$(tr ' ' ',' <<<"${PIP_FIND_LINKS:-}")} .venv/bin/uv pip install --quiet --no-deps \
	--target "$site" --python-version 3.12 --python-platform x86_64-manylinux_2_28 -r benchmarks/gpu/packages.txt
# Folders that packages leave at the top by mistake; one named tests would stand before this project's.
rm -rf "$site"/{bin,share,tests,scripts,recipe,tutorial} "$site"/ray/{jars,rllib,dashboard/client}
tar -c --sort=name --owner=0 --group=0 -C "$site" . | xz -T0 -6 >"$file.part"
mv "$file.part" "$file"

archive=$(stat -c %s "$file")
checkout=$(git ls-files -z | xargs -0 du -cb | tail -1 | cut -f1)
echo "$file: $((archive >> 20)) MiB, with the checkout $(((archive + checkout) >> 20)) MiB"
((archive + checkout <= limit)) || { echo "that is more than 60 MiB; leave packages out" >&2; exit 1; }
