#!/usr/bin/env bash
# Measures GRPO on one GPU within ten minutes, without a network: seconds by stage, memory, MFU, the waits that the
# policy `both` hides, and what the planner and dry=true said before.
#
#     benchmarks/gpu/run.sh DIRECTORY [key=value ...]        # for the results: table.md, table.json, logs.tar.gz
#     benchmarks/gpu/run.sh DIRECTORY --cpu [key=value ...]  # a rehearsal with a tiny model; its figures say nothing
#
# PYTHON names the interpreter (python3), LIMIT_S the seconds that all may take (570), BUNDLE the archive of bundle.sh
# (.gpu/site.tar.xz); where there is none, PYTHON has all packages. The keys go to all runs. Each part has a limit of its
# own, and the results are written after each. vLLM is not needed: transformers samples. Exits with 1 if a part failed.
set -uo pipefail
out=${1:?give the directory for the results}
shift
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
begun=$SECONDS
python=${PYTHON:-python3}
work=$(mktemp -d) failed=0 patience=1
trap 'rm -rf "$work"' EXIT
export HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1
export XDG_CACHE_HOME=$work/cache

# A part: its name, the most seconds it may take, its command.
part() {
	local name=$1 limit=$2 left=$((end - SECONDS)) begin=$SECONDS code watch=
	shift 2
	limit=$((limit * patience))
	((limit < left)) || limit=$left
	if ((limit < 15)); then
		code="no time was left"
	else
		if command -v nvidia-smi >/dev/null; then
			stdbuf -oL nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -lms 250 >"$work/$name.memory" &
			watch=$!
		fi
		timeout -k 10 "$limit" "$@" >"$work/$name.out" 2>"$work/$name.log"
		code=$?
		((code != 124 && code != 137)) || code="stopped after $limit s"
		[ -z "$watch" ] || kill "$watch"
	fi
	printf '%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - begin))" >>"$work/parts.tsv"
	echo "== $name: $([ "$code" = 0 ] && echo done || echo "FAILED ($code)"), $((SECONDS - begin)) s"
	[ "$code" = 0 ] || tail -n 25 "$work/$name".{out,log} 2>/dev/null
	"$python" benchmarks/gpu/table.py "$work" "$out"
	# Whole or not at all, if this machine is taken away meanwhile.
	tar -cz -C "$work" --exclude='./*/model' --exclude=cache --exclude=site . >"$out/logs.part"
	mv "$out/logs.part" "$out/logs.tar.gz"
	[ "$code" = 0 ] || failed=1
}

mkdir "$work/site"
bundle=${BUNDLE:-.gpu/site.tar.xz}
if [ -f "$bundle" ]; then
	tar -xJf "$bundle" -C "$work/site" || exit 2
fi
export PYTHONPATH=$work/site:$PWD

shapes=(0.5b 1.5b) tokens=256 on_gpu=(ray.gpus_per_worker=1 trainer.max_tokens_per_gpu=8192)
size=(data.prompts=32 engine.n=4 reward.concurrency=64)
if [ "${1:-}" = --cpu ]; then
	shift
	shapes=(tiny tiny) tokens=64 on_gpu=() size=(data.prompts=4 engine.n=2 reward.concurrency=4)
	patience=10 # what takes seconds on a GPU machine's many cores
fi
end=$((begun + ${LIMIT_S:-570 * patience}))
given=("$@")
# The arguments of a run: its name, the shape of its model, and keys of its own.
keys() {
	local name=$1 shape=$2
	shift 2
	echo pipelines/gsm8k_grpo.py name="$name" runs="$work/runs" model.path="$work/$shape/model" \
		data.train="$work/$shape/problems.jsonl" data.max_prompt_length="$tokens" engine.max_tokens="$tokens" \
		engine.rollout=hf custom_reward_function.path=benchmarks/gpu/score.py "${size[@]}" "${on_gpu[@]}" trainer.lr=1e-6 trainer.warmup_steps=0 val.every=0 checkpoint.every=0 \
		checkpoint.export=false "${given[@]}" "$@"
}
run() {
	local name=$1 limit=$2
	shift 2
	# shellcheck disable=SC2046  # keys have no spaces
	part "$name" "$limit" "$python" -m dataflow run $(keys "$name" "$@")
}

slow=custom_reward_function.reward_kwargs.scale

[ "$patience" != 1 ] || # where there is no GPU they are skipped
	part gpu-check 120 "$python" -m pytest -q -rs -p no:cacheprovider tests/project/test_cuda.py tests/engines/test_gpu.py
main=${shapes[0]} large=${shapes[1]}
part "make-$main" 60 "$python" benchmarks/gpu/prepare.py "$work/$main" "$main" "$tokens"
# shellcheck disable=SC2046
part "dry-$main" 60 "$python" -m dataflow run $(keys dry "$main" dry=true) --json
# Without waits first: its second step says how long the GPU works, and with that how slow rewards are to be.
run alone 120 "$main" policy=baseline steps=2
scale=$("$python" benchmarks/gpu/table.py "$work" --scale) || scale=0.1
run baseline 180 "$main" policy=baseline steps=4 $slow="$scale"
run both 150 "$main" policy=both steps=4 $slow="$scale"
part plan 60 "$python" -m dataflow plan "$work/runs/baseline" --json
[ -d "$work/$large" ] || part "make-$large" 60 "$python" benchmarks/gpu/prepare.py "$work/$large" "$large" "$tokens"
run lora 150 "$large" policy=baseline steps=2 trainer.lora.rank=32 trainer.gradient_checkpointing=true
cat "$out/table.md"
exit "$failed"
