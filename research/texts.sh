# English and Japanese manual pages of Debian 12, as corpora of bytes, for anytime.py
set -eu
apt-get install -y manpages manpages-dev manpages-ja
for language in manual:"manpages manpages-dev" japanese:manpages-ja; do
    folder=texts/${language%%:*}
    mkdir -p "$folder"
    for file in $(dpkg -L ${language#*:} | grep '\.gz$'); do
        [ -L "$file" ] || zcat "$file" > "$folder/$(basename "$file" .gz).txt"
    done
    python data.py --source "$folder" --out "data/${language%%:*}"
done
