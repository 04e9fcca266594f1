# The words of an array task's line of a file: as on a command line, quotes hold a word with spaces together.
line_words() { # FILE: sets `words`
  local number=$((SLURM_ARRAY_TASK_ID + 1)) line split
  line=$(sed -n "${number}p" "$1")
  line=${line#$'\xef\xbb\xbf'} # of editors on Windows, as is the next
  line=${line%$'\r'}
  [ -n "$line" ] || { echo "slurm: $1 has no line $number" >&2; exit 2; }
  # xargs takes quotes apart and runs nothing of the line
  split=$(xargs printf '%s\n' <<<"$line") || { echo "slurm: line $number of $1 has an open quote" >&2; exit 2; }
  mapfile -t words <<<"$split"
}
