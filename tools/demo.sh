#!/usr/bin/env bash
# The main job on the demo models of assets/demo: one video from text and one from a picture, each on
# two ranks that share one host copy of the DiT's blocks, through the launcher that real checkpoints
# use, and a sheet of their frames. Two CPU cores are enough; with a GPU, both ranks use the first.
# docs/demo-model.md says which words the models know.
#
# From the environment: PROMPT, and OUT, the folder for everything that is made.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly PROMPT="${PROMPT:-a red circle moves right on a blue background}"
readonly OUT="${OUT:-build/demo}"

# edit FILE NAME VALUE: set a value of a launcher, as a person does in an editor
edit() {
  local at
  at="$(grep -n -m 1 "^$2=" "$1" | cut -d : -f 1)"
  { head -n $((at - 1)) "$1"; printf '%s=%q\n' "$2" "$3"; tail -n +$((at + 1)) "$1"; } > "$1.new"
  mv "$1.new" "$1"
}

mkdir -p "$OUT"
for task in t2v i2v; do
  config="$OUT/$task.json"
  ranks='"parallel": {"seq_p_size": 2}, "allow_shared_gpu": true,'
  sed "s/\"infer_steps\"/$ranks\n  &/" "configs/demo_$task.json" > "$config"

  launcher="$OUT/run_$task.sh"
  cp launchers/run_wan_block_shared_offload.sh "$launcher"
  edit "$launcher" root "$PWD"
  edit "$launcher" task "$task"
  edit "$launcher" model_path "$PWD/assets/demo/$task"
  edit "$launcher" config_json "$config"
  edit "$launcher" prompt "$PROMPT"
  edit "$launcher" image_path "$PWD/assets/demo/first_frame.png"
  edit "$launcher" save_result_path "$OUT/$task.mp4"
  edit "$launcher" gpus 0
  edit "$launcher" processes 2
  printf '\n%s: bash %s\n' "$task" "$launcher"
  bash "$launcher"
done
sheet="$OUT/contact_sheet.png"
.venv/bin/python tools/contact_sheet.py "$OUT/t2v.mp4" "$OUT/i2v.mp4" --out "$sheet"
printf '\nThe videos: %s\n' "$(realpath "$OUT/t2v.mp4") $(realpath "$OUT/i2v.mp4")"
printf 'Their frames: %s\n' "$(realpath "$sheet")"
