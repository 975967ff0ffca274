#!/bin/sh
# Create the bucket $BUCKET on the SeaweedFS at $MASTER unless it is there: s3_bucket.sh. Waits for the server, 120 s at most.
set -eu
listed() { echo "s3.bucket.list" | weed shell -master="$MASTER" 2>/dev/null | grep -Eq "^ *$BUCKET[[:space:]]"; }
tries=60
until listed; do
    tries=$((tries - 1))
    if [ "$tries" -lt 0 ]; then
        echo "s3_bucket.sh: no bucket $BUCKET on $MASTER after 120 s" >&2
        exit 1
    fi
    echo "s3.bucket.create -name $BUCKET" | weed shell -master="$MASTER" >/dev/null 2>&1 || true
    listed || sleep 2
done
echo "bucket $BUCKET is there"
