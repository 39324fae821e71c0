"""Sandboxes that are directories: programs run as plain processes of this machine. It isolates NOTHING.

For machines without root, bubblewrap or control groups, and for programs that are trusted. A program sees the machine,
its network and the files of the user who runs Tangram, and can do to them what that user can. What holds of the
contract of managers, and what does not:

- a sandbox is a private directory with a workspace, which stands for `/work` of the contract and is the home of its
  programs; their temporary files are beside it. There is no other file system: paths outside `/work` are refused. File
  operations never leave the workspace, whatever links a program makes meanwhile; programs themselves, for which `/work`
  does not exist, may go anywhere;
- what actions leave running is stopped between actions, dies with the sandbox, and is found as process_tree.py
  describes;
- sandboxes die with their manager, but not if its process is killed: what it left runs on until the next manager at the
  same place ends it;
- the width is stated by affinity and environment, but no CPU limit is enforced and `resize` changes nothing;
- of the limits of a sandbox, memory and open files hold for each process and the disk for each file; the number of
  processes and the network are not limited.

Programs do not inherit the environment of this process, because it may hold secrets: a program gets PATH, the variables
of the sandbox and the action, and the width. In a session the variables of an action stay, as if they had been exported
by hand.
"""

from tangram.managers.sandboxes.process.manager import ProcessManager

__all__ = ["ProcessManager"]
