#!/usr/bin/env bash
# Wan 2.1 image to video on one GPU, with blocks in host memory that stream through it.
#
# Set the values below in this file. Variables of the environment do not override them, and
# arguments after the script's name are refused. Relative paths, here and in the JSON, are taken
# from the folder in which you call the script.
set -euo pipefail

# Where the project lies. Change this line if you copy the script elsewhere.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

task="i2v"
model_cls="wan2.1"
model_path=""
config_json="${root}/configs/offload/block/wan_block.json"
prompt="The scene comes to life: soft light, a slow camera move, fine detail."
negative_prompt=""
image_path=""
save_result_path="output.mp4"
seed="42"

# The GPUs, as CUDA_VISIBLE_DEVICES takes them, and the number of ranks, one for each GPU. The
# number is parallel.seq_p_size x parallel.cfg_p_size of the JSON; it is not counted from the list.
gpus="0"
processes="1"

# shellcheck source=launchers/launch.bash
source "${root}/launchers/launch.bash"
