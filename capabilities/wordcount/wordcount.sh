#!/bin/sh
# Counts the words, lines and characters of {"text":"…"} and answers with one result frame on MESH_FD.
# The payload is read from its descriptor, which holds it whole; INTENT_PAYLOAD has it only when it is short.
# Must never print to anything but MESH_FD what the node shall read: stdout and stderr are the log.
set -eu

# Undo JSON's escapes. Bytes above 127 pass as they are, so UTF-8 stays whole.
awk '
{
  text = substr($0, length("{\"text\":\"") + 1)
  text = substr(text, 1, length(text) - length("\"}"))
  while ((at = index(text, "\\")) > 0) {
    printf "%s", substr(text, 1, at - 1)
    mark = substr(text, at + 1, 1)
    skip = 2
    if (mark == "n") printf "\n"
    else if (mark == "t") printf "\t"
    else if (mark == "r") printf "\r"
    else if (mark == "f") printf "\f"
    else if (mark == "b") printf "\b"
    else if (mark == "u") { printf "\001"; skip = 6 }  # only control characters come escaped in this way
    else printf "%s", mark
    text = substr(text, at + skip)
  }
  printf "%s", text
}' <&"$INTENT_PAYLOAD_FD" >text

words=$(wc -w <text)
characters=$(wc -m <text)
lines=$(wc -l <text)
# A last line without an end counts too.
if [ -s text ] && [ "$(tail -c 1 text | wc -l)" -eq 0 ]; then
  lines=$((lines + 1))
fi

printf '{"kind":"result","result":{"words":%d,"lines":%d,"characters":%d}}\n' \
  "$words" "$lines" "$characters" >&"$MESH_FD"
