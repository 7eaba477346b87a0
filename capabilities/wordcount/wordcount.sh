#!/bin/sh
# Counts the words, lines and characters of {"text":"…"} and answers with one result frame on MESH_FD.
# The payload is read from its descriptor, which holds it whole; INTENT_PAYLOAD has it only when it is short.
# Must never print to anything but MESH_FD what the node shall read: stdout and stderr are the log.
set -eu

# Undo JSON's escapes: what lies between two backslashes is a record, so a long text takes linear time. Bytes above
# 127 pass as they are, so UTF-8 stays whole.
awk '
BEGIN { RS = "\\" }
function plain(text) { printf "%s", held; held = text }  # the last record still has the closing quote
NR == 1 { plain(substr($0, length("{\"text\":\"") + 1)); next }
is_after_backslash { is_after_backslash = 0; plain($0); next }
$0 == "" { is_after_backslash = 1; plain("\\"); next }
{
  mark = substr($0, 1, 1)
  rest = substr($0, 2)
  if (mark == "n") plain("\n")
  else if (mark == "t") plain("\t")
  else if (mark == "r") plain("\r")
  else if (mark == "f") plain("\f")
  else if (mark == "b") plain("\b")
  else if (mark == "u") { plain("\001"); rest = substr(rest, 5) }  # only control characters come escaped so
  else plain(mark)
  plain(rest)
}
END { printf "%s", substr(held, 1, length(held) - length("\"}")) }' <&"$INTENT_PAYLOAD_FD" >text

words=$(wc -w <text)
characters=$(wc -m <text)
lines=$(wc -l <text)
# A last line without an end counts too.
if [ -s text ] && [ "$(tail -c 1 text | wc -l)" -eq 0 ]; then
  lines=$((lines + 1))
fi

printf '{"kind":"result","result":{"words":%d,"lines":%d,"characters":%d}}\n' \
  "$words" "$lines" "$characters" >&"$MESH_FD"
