#!/usr/bin/env bash
# Build .venv in the repository: `setup_venv.sh cpu` or `setup_venv.sh gpu`; `make venv` calls it when it is needed.
set -euo pipefail
cd "$(dirname "$0")/.."

extra=$1
python=${PYTHON:-python3}
log=.venv/install.log

if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
  echo "PYTHON=${PYTHON:-}: lockstep needs Python 3.11 or 3.12; install one, or name it: make venv PYTHON=/path/to/python3.11" >&2
  exit 2
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv

now() { grep -v '^WARNING' "$log" | tail -n 1 | sed 's/^ *//; s/(from.*//'; } # what pip does at the moment

echo "installing the $extra environment into .venv (the first time: about 5 minutes and 4 GB); log: $log"
.venv/bin/python -m pip install --disable-pip-version-check --progress-bar off --no-compile -e ".[$extra,dev]" >"$log" 2>&1 &
pip=$!
trap 'kill "$pip" 2>/dev/null || true' INT TERM
began=$SECONDS
next=60
while kill -0 "$pip" 2>/dev/null; do
  sleep 1
  seconds=$((SECONDS - began))
  if [ -t 1 ]; then
    printf '\r\033[2K  %s s  %.100s' "$seconds" "$(now)"
  elif [ "$seconds" -ge "$next" ]; then
    next=$((seconds + 60))
    echo "  $seconds s: $(now | cut -c 1-100)"
  fi
done
if [ -t 1 ]; then printf '\r\033[2K'; fi
if ! wait "$pip"; then
  tail -n 15 "$log" >&2
  echo "pip failed; the whole log is $log" >&2
  exit 1
fi
if [ "$extra" = cpu ]; then
  # Beside a CPU build of torch, torchvision breaks `import peft` and torchaudio breaks vLLM; nothing here needs them.
  .venv/bin/python -m pip uninstall --disable-pip-version-check -y torchvision torchaudio torchcodec >>"$log" 2>&1
fi
# pip would compile every file on one core; what a run does not import need not be compiled, and takes room.
# These packages also hold templates that are no Python, hence the `|| true`.
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
.venv/bin/python -m compileall -qq -j 0 "$site/torch" "$site/vllm" "$site/ray" "$site/verl" >>"$log" 2>&1 || true
echo "  .venv is ready after $((SECONDS - began)) s"
