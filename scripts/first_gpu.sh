#!/usr/bin/env bash
# The first run on a machine with NVIDIA GPUs: what docs/cuda.md lists, from the installation to the handshake.
#
#   make setup && scripts/first_gpu.sh [OUTPUT_DIR]
#
# One line per check, a log file for each in OUTPUT_DIR; a failure does not stop the others. Exit code 1 if any failed.
# Needs no network. With models/Qwen3-0.6B in place (and the hub, for GSM8K) two steps of its recipe run too; with two
# GPUs or more, runs on two ranks.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin="${VENV:-.venv}/bin"
out="${1:-outputs/first_gpu-$(date +%Y%m%d-%H%M%S)}"
limit="${LIMIT_SECONDS:-1800}" # of each run
mkdir -p "$out" && out="$(cd "$out" && pwd)" || exit 1
export TITAN_RL_DEVICE=cuda
failed=()

check() { # check NAME COMMAND...
  local name="$1" started=$SECONDS result=ok
  shift
  "$@" >"$out/$name.log" 2>&1 || { result=FAIL && failed+=("$name"); }
  printf '%-4s  %-22s %5ds  %s\n' "$result" "$name" $((SECONDS - started)) "$(grep '^=> ' "$out/$name.log" | tail -n 1)"
}

launch() { # launch RANKS MODULE RECIPE FOLDER [OPTION...]
  local ranks="$1" module="$2" recipe="$3" folder="$4"
  shift 4
  timeout "$limit" "$bin/torchrun" --standalone --nproc-per-node "$ranks" -m "titan_rl.$module" \
    "train_configs/$recipe.toml" --dump_folder "$out/$folder" "$@"
}

grpo() { # grpo RANKS FOLDER [OPTION...]: the tiny recipe, from the model pretrained below
  local ranks="$1" folder="$2"
  shift 2
  launch "$ranks" train tiny_grpo "$folder" \
    --checkpoint.initial_load_path "$out/tiny_pretrain/checkpoint/step-400" "$@"
}

# Four steps, for branches of which only "runs, and passes the handshake" is asked.
short=(--training.steps 4 --evaluation.minimum_gain none --evaluation.num_prompts 20)
fp32=(--training.mixed_precision_param float32) # the handshake's default bound, 5e-4
bf16=(--weight_sync.max_probe_difference 0.1)   # bf16 is the default on CUDA

functional() { # our functions on the GPU, against float64 on the CPU
  "$bin/python" - <<'PY'
import torch

from titan_rl.functional.checksum import tensor_checksum
from titan_rl.functional.logprobs import chunked_logprobs

torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16, torch.int64):
    for size in (1, 1000, 2**15, 5_000_003):
        values = torch.randn(size).mul(1000).to(dtype)
        assert tensor_checksum(values.cuda()) == tensor_checksum(values), (dtype, size)

hidden, weight, targets = torch.randn(3000, 256), torch.randn(1000, 256) / 16, torch.randint(1000, (3000,))


def run(dtype, device, exact):
    inputs = [x.to(dtype).to(device, torch.float64 if exact else dtype, copy=True) for x in (hidden, weight)]
    inputs = [x.requires_grad_() for x in inputs]
    logprobs, entropy = chunked_logprobs(*inputs, targets.to(device), temperature=0.7, with_entropy=True)
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    return [x.detach().double().cpu() for x in (logprobs, entropy, inputs[0].grad, inputs[1].grad)]


worst = {}
for dtype, bounds in ((torch.float32, (1e-4, 1e-4)), (torch.bfloat16, (1e-4, 1e-2))):
    ours, exact = run(dtype, "cuda", False), run(dtype, "cpu", True)
    values = max(float((a - b).abs().max()) for a, b in zip(ours[:2], exact[:2]))
    grads = max(float((a - b).norm() / b.norm()) for a, b in zip(ours[2:], exact[2:]))
    worst[str(dtype)] = f"values {values:.1e}, gradients {grads:.1e} relative"
    assert values <= bounds[0] and grads <= bounds[1], worst
print("=>", worst)
PY
}

bounds() { # bounds FOLDER [MOST_OF_PROBE MOST_OF_MISMATCH]: largest differences that a run logged, in nats
  "$bin/python" - "$out/$1" "${2:-inf}" "${3:-inf}" <<'PY'
import math
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

folder, most = Path(sys.argv[1]), [float(x) for x in sys.argv[2:4]]
largest = {"weight_sync/probe_difference": 0.0, "loss/mismatch_abs_max": 0.0, "loss/mismatch_abs": 0.0}
for start in sorted((folder / "tb").iterdir()):
    events = EventAccumulator(str(start)).Reload()
    for name in largest:
        values = [event.value for event in events.Scalars(name)] or [math.nan]
        largest[name] = max(largest[name], *values) if all(map(math.isfinite, values)) else math.inf
print("=>", "  ".join(f"{name} {value:.1e}" for name, value in largest.items()))
first, second, _ = largest.values()
sys.exit(not (math.isfinite(second) and first <= most[0] and second <= most[1]))
PY
}

resume() { # ten steps, the same command with twenty, then an evaluation of the result
  grpo 1 resume "${fp32[@]}" --training.steps 10 --evaluation.minimum_gain none &&
    grpo 1 resume "${fp32[@]}" --training.steps 20 --evaluation.minimum_gain none &&
    grep -q '"policy_version": 20' "$out/resume/summary.json" &&
    launch 1 evaluate tiny_grpo resume "${fp32[@]}" --training.steps 20 \
      --checkpoint.initial_load_path "$out/tiny_pretrain/checkpoint/step-400"
}

check doctor "$bin/titan-rl" doctor --dump-folder "$out"
check unit_tests "$bin/python" -m pytest tests/unit/functional tests/unit/batching tests/unit/algorithms
check functional functional

# The model, in bf16; then GRPO in fp32 and bf16, each of which has to learn (minimum_gain = 0.3).
check tiny_pretrain launch 1 train tiny_pretrain tiny_pretrain
check grpo_fp32 grpo 1 grpo_fp32 "${fp32[@]}"
check grpo_fp32_bounds bounds grpo_fp32 5e-4 5e-4
check grpo_bf16 grpo 1 grpo_bf16 "${bf16[@]}"
check grpo_bf16_bounds bounds grpo_bf16 # what they say is what max_probe_difference should be set from
check grpo_local grpo 1 grpo_local "${fp32[@]}" --generator.type local
check grpo_local_bounds bounds grpo_local 5e-4 5e-4

# Branches that differ from these in one thing.
check no_sleep grpo 1 no_sleep "${fp32[@]}" "${short[@]}" --generator.enable_sleep_mode false
check eager grpo 1 eager "${fp32[@]}" "${short[@]}" --generator.enforce_eager true
check two_steps grpo 1 two_steps "${fp32[@]}" "${short[@]}" --algorithm.steps_per_iteration 2
check reference_offload grpo 1 reference_offload "${fp32[@]}" "${short[@]}" --reference.offload_to_cpu true
check cpu_offload grpo 1 cpu_offload "${fp32[@]}" "${short[@]}" --training.enable_cpu_offload true
check activation_full grpo 1 activation_full "${fp32[@]}" "${short[@]}" --activation_checkpoint.type full
check varlen grpo 1 varlen "${bf16[@]}" "${short[@]}" --model.attn_backend varlen
check compile grpo 1 compile "${bf16[@]}" "${short[@]}" --compile.enable true --batching.pad_to token_budget
check async_checkpoint grpo 1 async_checkpoint "${fp32[@]}" "${short[@]}" --checkpoint.interval 2 \
  --checkpoint.async_mode async_with_pinned_mem
check resume resume

gpus="$("$bin/python" -c 'import torch; print(torch.cuda.device_count())')"
if [[ "$gpus" -ge 2 ]]; then
  check two_ranks grpo 2 two_ranks "${fp32[@]}"
  check two_ranks_bounds bounds two_ranks 5e-4 5e-4
  check hsdp grpo 2 hsdp "${fp32[@]}" "${short[@]}" --parallelism.data_parallel_replicate_degree 2
  check generator_tp grpo 2 generator_tp "${fp32[@]}" "${short[@]}" --generator.tensor_parallel_degree 2
  check generator_tp_bounds bounds generator_tp 5e-4 5e-4
  for axis in tensor context; do
    check "${axis}_parallel" grpo 2 "${axis}_parallel" "${fp32[@]}" "${short[@]}" "--parallelism.${axis}_parallel_degree" 2
    check "${axis}_parallel_bounds" bounds "${axis}_parallel" 5e-4 5e-4
  done
else
  echo "skip  runs on two ranks: $gpus GPU(s)"
fi

if [[ -d models/Qwen3-0.6B ]]; then
  check qwen3_0.6b launch 1 train qwen3_0.6b_gsm8k_grpo qwen3_0.6b --training.steps 2 --evaluation.num_prompts 20 \
    --checkpoint.enable false
  check qwen3_0.6b_bounds bounds qwen3_0.6b
else
  echo "skip  Qwen3-0.6B: no models/Qwen3-0.6B"
fi

echo "logs: $out"
if [[ ${#failed[@]} -gt 0 ]]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
echo "all checks passed"
