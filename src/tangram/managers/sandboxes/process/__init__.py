"""Sandboxes that are directories: programs run as plain processes of this machine. It isolates NOTHING.

For machines where neither root, bubblewrap nor control groups are to be had, and for programs that are trusted. A
program sees the machine, its network and the files of the user who runs Tangram, and can do to them what that user can.
What is kept of the contract of managers, and what is not:

- a sandbox is a private directory with a workspace, which `/work` of the contract means, and which is the home of its
  programs; their temporary files are beside it. There is no other file system of its own: paths outside `/work` are
  refused. File work never leaves the workspace, whatever links a program makes meanwhile; programs themselves, which
  do not know the name `/work`, go where they like;
- what actions leave running stands still between actions, dies with the sandbox, and is found as `process_tree` says;
- sandboxes die with their manager, but not with a process that is killed: what it left runs on until the next manager
  at the same place ends it;
- the width is told, by affinity and environment, but no limit of CPU is enforced and `resize` changes nothing;
- of the sizes of a sandbox, memory and open files hold for each process alone and the disk for each file alone;
  the number of processes and the network are not limited.

The environment of this process is not handed on, because it may hold secrets: a program gets PATH, what the sandbox and
the action say, and the width. In a session the variables of an action stay, as if they had been exported by hand.
"""

from tangram.managers.sandboxes.process.manager import ProcessManager

__all__ = ["ProcessManager"]
