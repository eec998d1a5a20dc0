#!/usr/bin/env bash
# Exit with status 0 if a version of a model is available: is_ready.sh HOST PORT MODEL
set -euo pipefail
exec 3<>"/dev/tcp/$1/$2"
printf 'GET /v1/models/%s HTTP/1.0\r\nHost: %s\r\nConnection: close\r\n\r\n' "$3" "$1" >&3
grep --quiet '"state": *"AVAILABLE"' <&3
