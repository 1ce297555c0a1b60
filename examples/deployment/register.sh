#!/usr/bin/env bash
# Let sites in: register.sh SERVER_FOLDER [ADDRESS] [SITE...]
#
# Without names every key in SERVER_FOLDER/sites is registered. A site that is not registered is turned away.
set -euo pipefail

folder=$(cd "${1:?register.sh SERVER_FOLDER [ADDRESS] [SITE...]}" && pwd) address=${2:-127.0.0.1:8000}
shift $(($# < 2 ? $# : 2))
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_HOME="$folder/flwr"
mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml" <<TOML
[superlink]
default = "federation"

[superlink.federation]
address = "$address"
root-certificates = "$folder/ca.crt"
TOML
if [ $# -eq 0 ]; then
    set -- $(cd "$folder/sites" && ls ./*.pub | sed 's|^./||; s|\.pub$||')
fi
for site in "$@"; do
    flwr supernode register "$folder/sites/$site.pub" federation --name "$site"
done
