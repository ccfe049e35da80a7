# The five texts of race.py, from packages of Debian 12, as corpora of bytes
set -eu
apt-get install -y --no-install-recommends \
    linux-source-6.1 python3.11-doc bible-kjv manpages-ru unicode-data
mkdir -p texts/c texts/html texts/english texts/russian texts/tables

# C: the core of Linux
tar -xJf /usr/src/linux-source-6.1.tar.xz -C texts/c --strip-components 1 --wildcards \
    'linux-source-6.1/kernel/*.c' 'linux-source-6.1/mm/*.c' 'linux-source-6.1/lib/*.c'

# HTML: the documentation of Python
find /usr/share/doc/python3.11/html/ -name '*.html' -exec cp {} texts/html \;

# English prose: the King James Bible, a file for every book
bible -f 'Gen1:1-Rev22:21' | awk '{
    book = $1
    sub(/[0-9]+:[0-9]+$/, "", book)
    print substr($0, index($0, " ") + 1) > "texts/english/" book ".txt"
}'

# Russian: manual pages
for file in $(dpkg -L manpages-ru | grep '\.gz$'); do
    [ -L "$file" ] || zcat "$file" > "texts/russian/$(basename "$file" .gz).txt"
done

# Tables: the characters of Unicode
cp /usr/share/unicode/UnicodeData.txt texts/tables
for file in /usr/share/unicode/Unihan_*.bz2; do
    bzcat "$file" > "texts/tables/$(basename "$file" .bz2)"
done

for text in c html english russian tables; do
    python data.py --source "texts/$text" --out "data/$text"
done
