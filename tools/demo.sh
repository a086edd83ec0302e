#!/usr/bin/env bash
# The main job on a tiny checkpoint of random weights: makes the checkpoint, then one video from text
# and one from a picture, with the command line that real checkpoints use. The weights are random,
# so the videos show coloured noise; everything else is the real path.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly PROMPT="${PROMPT:-a red circle moves right on a blue background}"
readonly OUT=build/demo

for task in t2v i2v; do
  model=$OUT/$task
  [[ -d $model ]] || .venv/bin/shared-offload synth --size tiny --task "$task" --out "$model"
  picture=()
  [[ $task == t2v ]] || picture=(--image_path assets/first_frame.jpg)
  .venv/bin/python -m shared_offload.infer --model_cls wan2.1 --task "$task" \
    --model_path "$model" --config_json "configs/demo_$task.json" --prompt "$PROMPT" \
    "${picture[@]}" --save_result_path "$OUT/$task.mp4" --seed 42
done
printf '\nThe videos: %s\n' "$(realpath $OUT/t2v.mp4) $(realpath $OUT/i2v.mp4)"
