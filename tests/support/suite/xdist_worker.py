"""What `python -u -c <bootstrap of execnet>` runs: the controller sends the program."""

import sys

if __name__ == "__main__":
    exec(eval(sys.stdin.readline()))
