"""Sandboxes that are directories: programs run as plain processes of this machine. It isolates NOTHING.

For machines without root, bubblewrap or control groups, and for trusted programs. A program has access to the machine,
its network and the files of the user who runs Tangram, with the rights of that user. The contract of managers holds as
follows:

- a sandbox is a private directory with a workspace, which is `/work` of the contract and the home of its
  programs; their temporary files are beside it. There is no other file system: paths outside `/work` are refused. File
  operations never leave the workspace, even if a program creates links meanwhile; programs themselves, for which
  `/work` does not exist, may access any path;
- processes that actions leave running are stopped between actions, end with the sandbox, and are found as
  process_tree.py describes;
- sandboxes end with their manager, but not if its process is killed: then their processes run until the next manager in
  the same directory ends them;
- the width is stated by affinity and environment, but no CPU limit is enforced and `resize` changes nothing;
- of the limits of a sandbox, memory and open files hold for each process and the disk for each file; the number of
  processes and the network are not limited.

Programs do not inherit the environment of this process, because it may hold secrets: a program gets PATH, the variables
of the sandbox and the action, and the width. In a session the variables of an action stay, as if they had been exported
by hand.
"""

from tangram.managers.sandboxes.process.manager import ProcessManager

__all__ = ["ProcessManager"]
