#!/usr/bin/env bash
# Certificates and keys of a federation: make-certificates.sh FOLDER SERVER SITE...
#
#   SERVER  the name or address under which sites reach the SuperLink
#
# FOLDER/server goes to the server, FOLDER/SITE to that site, and FOLDER/authority stays where it was made: whoever
# has authority/ca.key can pose as the server.
set -euo pipefail
umask 077

if [ $# -lt 3 ]; then
    sed -n '2,7p' "$0"
    exit 2
fi
folder=$1 server=$2
shift 2
mkdir -p "$folder/authority" "$folder/server"
cd "$folder"

if [ ! -e authority/ca.key ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:secp384r1 -nodes -sha384 -days 3650 \
        -subj "/CN=fedweave authority" -keyout authority/ca.key -out authority/ca.crt 2>/dev/null
fi
if [ ! -e server/server.key ]; then
    case $server in
        *[!0-9.]*) names="DNS:$server,DNS:localhost,IP:127.0.0.1" ;;
        *) names="IP:$server,DNS:localhost,IP:127.0.0.1" ;;
    esac
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:secp384r1 -nodes -sha384 -subj "/CN=$server" \
        -keyout server/server.key -out server/server.csr 2>/dev/null
    openssl x509 -req -in server/server.csr -CA authority/ca.crt -CAkey authority/ca.key -CAcreateserial -sha384 \
        -days 825 -extfile <(echo "subjectAltName=$names") -out server/server.crt 2>/dev/null
    rm server/server.csr
    cp authority/ca.crt server/ca.crt
    openssl rand -hex 32 > server/federate.secret
fi
for site in "$@"; do
    mkdir -p "$site" server/sites
    if [ ! -e "$site/site.key" ]; then
        ssh-keygen -q -t ecdsa -b 384 -N "" -C "$site" -f "$site/site.key"
        cp authority/ca.crt "$site/ca.crt"
    fi
    cp "$site/site.key.pub" "server/sites/$site.pub"
    echo "$folder/$site: give it to site $site (ca.crt, site.key)"
done
echo "$folder/server: give it to the server (ca.crt, server.crt, server.key, federate.secret, sites/*.pub)"
