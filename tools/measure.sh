#!/usr/bin/env bash
# Measures what docs/performance.md says, on this host, part by part:
#
#   tools/measure.sh MODEL OUT PART...
#
# MODEL: the folder of a 14B i2v checkpoint with FP8 block files; the part `checkpoint` makes one of
# random weights. OUT: the folder for a log and a JSON of each part. A part that fails is told at
# the end, and the parts after it run all the same. Parts:
#   host imports checkpoint tests step share step-720p accuracy modes modes-two two kill server end-to-end
#   vae encoders load register stream diffusers
set -euo pipefail
(($# > 2)) || { sed -n '2,/^set/{/^set/!p}' "$0" | cut -c 3- >&2; exit 2; }
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
model="$(realpath -m "$1")" out="$(realpath -m "$2")"
shift 2
mkdir -p "${out}"
cd "${root}"
python=python3
[[ ! -x .venv/bin/python ]] || python=.venv/bin/python
export PYTHONPATH="${root}${PYTHONPATH:+:${PYTHONPATH}}" PYTHONUNBUFFERED=1

cli=("${python}" -m shared_offload.cli)
two=("${python}" -m torch.distributed.run --standalone --nproc_per_node=2)
# bench NAME WHAT ...: a measurement whose figures go to NAME.json
bench() { local name="$1"; shift; "${cli[@]}" bench "$@" --json "${out}/${name}.json"; }

# config NAME KEY:VALUE...: a config for this checkpoint
config() {
  local path="${out}/$1.config.json"
  shift
  local keys='"dit_quantized": true, "dit_quant_scheme": "fp8-vllm", "enable_cfg": true'
  keys+=', "cpu_offload": true, "shared_cpu_weights": true'
  for key in "$@"; do keys+=", ${key}"; done
  echo "{${keys}}" >"${path}"
  echo "${path}"
}

host() {
  nvidia-smi || true
  lscpu
  free -g
  cat /sys/kernel/mm/transparent_hugepage/shmem_enabled
  "${cli[@]}" doctor || true
}
imports() { # twice: the first finds files on the disk, perhaps
  local code='import sys, time; begun = time.time(); import WHAT
print("WHAT", round(time.time() - begun, 2), "s,", len(sys.modules), "modules")'
  for _ in 1 2; do
    "${python}" -c "${code//WHAT/torch}"
    "${python}" -c "${code//WHAT/shared_offload.infer}"
    "${python}" -c "${code//WHAT/transformers.models.umt5.modeling_umt5}"
    "${python}" -c "${code//WHAT/diffusers.models.autoencoders.autoencoder_kl_wan}"
  done
}
checkpoint() {
  "${cli[@]}" synth --size 14b --task i2v --out "${model}" --only dit-fp8,t5,clip,vae,tokenizer
}
tests() { "${python}" -m pytest -q -p no:cacheprovider -m "gpu or multigpu" --durations=15; }
step() { bench step step --weights both; }
share() { bench share step --weights both --share 1/8 --steps 6; }
step-720p() { bench step-720p step --weights both --height 720 --width 1280 --steps 2; }
accuracy() { bench accuracy accuracy --size 14b --task i2v; }
stream() { bench stream stream --size 14b --task i2v; }
modes() { bench modes modes resident host half phase model disk --model_path "${model}"; }
modes-two() {
  "${two[@]}" -m shared_offload.cli bench modes resident host numa private one-decodes \
    --model_path "${model}" --json "${out}/modes-two.json"
}
two() { bench two end-to-end --ranks 2 --steps 4 --model_path "${model}"; }
end-to-end() { bench end-to-end end-to-end --next --model_path "${model}"; }
vae() { bench vae vae --video 480x832 --limit 4; }
encoders() { bench encoders encoders --model_path "${model}"; }
load() { bench load load --model_path "${model}/fp8" --threads 8 16; }
register() { "${cli[@]}" bench register --processes 8 --gib 16; }
diffusers() { # the best of each of its ways
  "${python}" tools/bench_diffusers.py --size 14b --task i2v --json "${out}/diffusers.json" --modes \
    ours-fp8,bf16-resident,bf16-model-offload,bf16-leaf,fp8-cast-resident,fp8-torchao-resident
}

# A warm server against a cold start: the sum of stages up to the first step.
server() {
  local pid warm
  config cold '"weight_server": "off"'
  warm="$(config warm '"weight_server": "require"')"
  "${cli[@]}" serve-weights --task i2v --config_json "${warm}" --model_path "${model}" &
  pid=$!
  until "${cli[@]}" status | grep -q sealed; do
    kill -0 "${pid}" || return 1
    sleep 1
  done
  for name in warm cold warm cold; do # the first of each finds its libraries on the disk, perhaps
    bench "server-${name}" end-to-end --model_path "${model}" \
      --config_json "${out}/${name}.config.json" --steps 3
  done
  kill "${pid}"
  wait "${pid}"
}

# One rank of two killed in a step: seconds until all are gone, and what is left.
kill_one() {
  local json before begun
  json="$(config kill '"parallel": {"seq_p_size": 2}' '"infer_steps": 100')"
  before="$(ipcs -m)"
  "${two[@]}" -m shared_offload.infer --task i2v --model_path "${model}" --config_json "${json}" \
    --prompt "a boat on a lake" --image_path assets/first_frame.jpg \
    --save_result_path "${out}/killed.mp4" >"${out}/killed.log" 2>&1 &
  local launcher=$!
  until grep -q "^denoise: [0-9]* / " "${out}/killed.log"; do
    kill -0 "${launcher}" || { cat "${out}/killed.log"; return 1; }
    sleep 1
  done
  begun="${EPOCHREALTIME}"
  kill -KILL "$(pgrep -P "${launcher}" | tail -1)"
  wait "${launcher}" || echo "torchrun ended with $?"
  echo "gone after $(((${EPOCHREALTIME/./} - ${begun/./}) / 1000)) ms"
  tail -30 "${out}/killed.log"
  [[ "$(ipcs -m)" == "${before}" ]]
  pgrep -f shared_offload.infer && return 1
  nvidia-smi --query-gpu=memory.used --format=csv || true
}

failed=()
for part in "$@"; do
  name="${part}"
  [[ "${part}" != kill ]] || name=kill_one # a builtin has that name
  declare -F "${name}" >/dev/null || { echo "no part ${part}" >&2; exit 2; }
  echo "== ${part}"
  begun="${SECONDS}"
  set +e # `||` would switch it off within the part too
  (set -e; "${name}") 2>&1 | tee "${out}/${part}.log"
  ((PIPESTATUS[0] == 0)) || failed+=("${part}")
  set -e
  echo "== ${part}: $((SECONDS - begun)) s"
done
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}" >&2; exit 1; }
