# Sourced by the launchers once their values are set: checks them, then becomes torchrun.
# shellcheck shell=bash disable=SC2154  # the values are set in the launcher

script="${BASH_SOURCE[1]}"
problems=()

# line NAME: "line N of SCRIPT", where the value is set
line() {
  printf 'line %s of %s' "$(grep -n -m 1 "^$1=" "${script}" | cut -d : -f 1)" "${script}"
}

# need NAME: the value is not empty
need() {
  [[ -n "${!1}" ]] || problems+=("$1 is not set; edit $(line "$1")")
}

# need_path TEST NAME WHAT: the value is an existing path (TEST as in `[[ TEST path ]]`)
need_path() {
  need "$2"
  local path="${!2}"
  if [[ -n "${path}" ]] && ! test "$1" "${path}"; then
    [[ "${path}" == /* ]] || path="${PWD}/${path}"
    problems+=("$2: there is no $3 ${path}; edit $(line "$2")")
  fi
}

stop_on_problems() {
  ((${#problems[@]})) || return 0
  printf '%s\n' "${problems[@]}" >&2
  exit 2
}

if (($#)); then
  problems+=("${script} forwards no arguments, and got: $*")
  problems+=("hint: its values are set in the script itself, from $(line task) on")
  stop_on_problems
fi

need task
need_path -d model_path folder
need_path -f config_json file
[[ "${task}" != i2v ]] || need_path -f image_path file
need prompt
need save_result_path
need seed
need gpus
[[ "${processes}" =~ ^[1-9][0-9]*$ ]] ||
  problems+=("processes is '${processes}', not a number of ranks; edit $(line processes)")
stop_on_problems

arguments=(
  --model_cls "${model_cls}"
  --task "${task}"
  --model_path "${model_path}"
  --config_json "${config_json}"
  --prompt "${prompt}"
  --negative_prompt "${negative_prompt}"
  --seed "${seed}"
  --save_result_path "${save_result_path}"
)
[[ "${task}" != i2v ]] || arguments+=(--image_path "${image_path}")

python=python3
[[ ! -x "${root}/.venv/bin/python" ]] || python="${root}/.venv/bin/python"

export CUDA_VISIBLE_DEVICES="${gpus}"
export PYTHONPATH="${root}${PYTHONPATH:+:${PYTHONPATH}}"
if [[ -z "${OMP_NUM_THREADS:-}" ]]; then # else torchrun sets 1, and says so in a long warning
  threads=$(($(nproc) / processes))
  export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi

# --standalone: a free port of its own, so that two launchers can run on one host.
exec "${python}" -m torch.distributed.run --standalone --nproc_per_node="${processes}" \
  -m shared_offload.infer "${arguments[@]}"
