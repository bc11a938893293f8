"""Twelve attempts to harm the machine from a sandbox. Each raises an AssertionError if it succeeds."""

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from weft.workers.sandbox import Limits, ProgramEnding, Result, Sandbox

PATIENCE_S = 300.0
LIMITS = Limits(cpu_s=30, wall_s=PATIENCE_S, disk_bytes=8 << 20, memory_bytes=256 << 20)

TRY = """
import ctypes, errno, json, os, socket, stat, sys
libc = ctypes.CDLL(None, use_errno=True)
done = []

def attempt(name, action):
    try:
        value = action()
    except (OSError, ValueError, LookupError):
        return
    done.append([name, str(value)[:80]])

def call(name, *arguments):
    function = getattr(libc, name)
    if function(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)

def read(path):
    with open(path, "rb") as file:
        return file.read(100)

def write(path, data=b"1"):
    with open(path, "wb", buffering=0) as file:
        file.write(data)
"""


def succeeded(sandbox: Sandbox, program: str, *arguments: str) -> list[list[str]]:
    """Run attempts in a sandbox, and return the successful ones."""
    code = f"{TRY}\n{program}\nprint(json.dumps(done))"
    result = sandbox.run(
        ["python", "-I", "-S", "attack.py", *arguments], files={"attack.py": code.encode()}
    )
    assert result.succeeded, result
    return json.loads(result.stdout)


def harmless(sandbox: Sandbox, program: str, *arguments: str, virtual: Sequence[str] = ()) -> None:
    """Assert that no attempt succeeds. gVisor's own kernel may grant the attempts in `virtual`, which
    do not reach the machine's kernel."""
    found = succeeded(sandbox, program, *arguments)
    if sandbox.engine == "gvisor":
        found = [(name, value) for name, value in found if name not in virtual]
    assert not found, f"a program could: {found}"


def python(sandbox: Sandbox, program: str) -> Result:
    return sandbox.run(["python", "-I", "-S", "-c", program])


def still_works(sandbox: Sandbox) -> None:
    result = sandbox.run(["echo", "works"])
    assert result.stdout == b"works\n", result


def fork_bomb(engine: str) -> None:
    program = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    with Sandbox(LIMITS, engine=engine) as sandbox:
        assert python(sandbox, program).ending is ProgramEnding.TOO_MANY_PROCESSES
        assert python(sandbox, "import os; print(len(os.listdir('/proc')))").succeeded
        still_works(sandbox)


def ten_gigabytes_of_output(engine: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Sandbox(LIMITS, engine=engine) as sandbox:
        for command in ("yes 0123456789 | head -c 10G", "yes 0123456789 | head -c 10G >&2"):
            result = sandbox.run(["sh", "-c", command])
            assert result.ending is ProgramEnding.TOO_MUCH_OUTPUT
            assert len(result.stdout) + len(result.stderr) <= LIMITS.output_bytes
        still_works(sandbox)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kb < 100_000, f"this process grew by {grown_kb:,} kB"


def proc(engine: str) -> None:
    program = """
def others():
    found = [pid for pid in os.listdir("/proc") if pid.isdigit() and pid not in ("1", str(os.getpid()))]
    if not found:
        raise OSError
    return found
attempt("see other processes", others)
for name in ("environ", "mem", "maps", "fd/0", "cwd"):
    attempt(f"read /proc/1/{name}", lambda: read(f"/proc/1/{name}"))
attempt("write /proc/1/mem", lambda: write("/proc/1/mem"))
attempt("read the kernel's memory", lambda: read("/proc/kcore"))
for name in ("sys/kernel/core_pattern", "sys/kernel/hostname", "sys/vm/drop_caches", "sysrq-trigger"):
    attempt(f"write /proc/{name}", lambda: write(f"/proc/{name}", b"|/bin/sh"))
attempt("hide from the kernel when memory runs out", lambda: write("/proc/self/oom_score_adj", b"-1000"))
"""
    names = tuple(f"read /proc/1/{name}" for name in ("environ", "maps", "fd/0"))
    with Sandbox(LIMITS, engine=engine) as sandbox:
        virtual = (*names, "hide from the kernel when memory runs out")
        harmless(sandbox, program, virtual=virtual)


def ptrace(engine: str) -> None:
    program = """
attempt("trace process 1", lambda: call("ptrace", 16, 1, 0, 0))
child = os.fork()
if child == 0:
    import time
    time.sleep(60)
attempt("trace a child", lambda: call("ptrace", 16, child, 0, 0))
vector = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8)
attempt("read memory of process 1", lambda: call("process_vm_readv", 1, vector, 1, vector, 1, 0))
attempt("limit process 1", lambda: call("prlimit", 1, 0, (ctypes.c_ulong * 2)(1, 1), None))
attempt("slow process 1 down", lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))
attempt("move process 1", lambda: os.sched_setaffinity(1, {0}))
"""
    with Sandbox(LIMITS, engine=engine) as sandbox:
        virtual = ("trace a child", "slow process 1 down", "move process 1")
        harmless(sandbox, program, virtual=virtual)


def symlinks(engine: str) -> None:
    program = """
secret, target = sys.argv[1:]
os.symlink(secret, "link")
os.symlink(target, "out")
os.symlink("/proc/1/root", "root")
os.symlink("../" * 20 + secret[1:], "up")
for path in ("link", "up", "root" + secret, "/proc/1/cwd/.." + secret, "/proc/self/root/.." + secret):
    attempt(f"read {path}", lambda: read(path))
attempt("write through a link", lambda: write("out"))
attempt("link a file", lambda: os.link(secret, "hard"))
"""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        secret, target = Path(folder, "secret"), Path(folder, "target")
        secret.write_text("secret")
        target.write_text("unchanged")
        for path, mode in ((Path(folder), 0o777), (secret, 0o666), (target, 0o666)):
            path.chmod(mode)  # so that nothing but the sandbox protects them
        with Sandbox(LIMITS, engine=engine) as sandbox:
            harmless(sandbox, program, str(secret), str(target))
        assert target.read_text() == "unchanged"


def sockets(engine: str) -> None:
    program = """
port, path, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
def connect(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as client:
        client.settimeout(5)
        client.connect(address)
attempt("connect to the machine", lambda: connect(socket.AF_INET, ("127.0.0.1", port)))
attempt("connect to the network", lambda: connect(socket.AF_INET, ("192.0.2.1", 80)))
attempt("send to the network", lambda: connect(socket.AF_INET6, ("2001:db8::1", 80)))
attempt("connect to a socket of the machine", lambda: connect(socket.AF_UNIX, path))
attempt("connect to an abstract socket", lambda: connect(socket.AF_UNIX, "\\0" + name))
attempt("open a network socket", lambda: socket.socket(socket.AF_INET))
attempt("open a netlink socket", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
attempt("open a raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt("open a packet socket", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt("reach the hypervisor", lambda: connect(socket.AF_VSOCK, (2, 1024)))
attempt("use the kernel's cryptography", lambda: socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET))
"""
    name = f"weft-attack-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as listening:
        path = str(Path(folder, "socket"))
        servers = [socket.socket(f) for f in (socket.AF_INET, socket.AF_UNIX, socket.AF_UNIX)]
        for server, address in zip(servers, (("127.0.0.1", 0), path, f"\0{name}"), strict=True):
            listening.enter_context(server)
            server.bind(address)
            server.listen()
            server.setblocking(False)
        port = str(servers[0].getsockname()[1])
        with Sandbox(LIMITS, engine=engine) as sandbox:
            virtual = ("open a network socket", "open a netlink socket")
            harmless(sandbox, program, port, path, name, virtual=virtual)
        for server in servers:
            with contextlib.suppress(BlockingIOError):
                raise AssertionError(f"{server.accept()[0]} was connected")


def mounts(engine: str) -> None:
    program = """
os.mkdir("mount")
attempt("mount", lambda: call("mount", b"tmpfs", b"/tmp/mount", b"tmpfs", 0, None))
attempt("mount /proc", lambda: call("mount", b"proc", b"/tmp/mount", b"proc", 0, None))
attempt("remount", lambda: call("mount", None, b"/usr", None, 32 | 4096, None))
attempt("unmount", lambda: call("umount2", b"/usr", 2))
attempt("chroot", lambda: os.chroot("/tmp"))
attempt("new mount namespace", lambda: call("unshare", 0x20000))
attempt("new user namespace", lambda: call("unshare", 0x10000000))
attempt("clone with namespaces", lambda: call("syscall", 220 if os.uname().machine == "aarch64" else 56, 0x10000000 | 17, 0, 0, 0, 0))
attempt("join a namespace", lambda: call("setns", os.open("/proc/self/ns/user", os.O_RDONLY), 0))
for folder in ("/", "/usr", "/usr/bin", "/dev", "/etc", "/run", "/proc", sys.prefix):
    attempt(f"write to {folder}", lambda: write(f"{folder}/written"))
"""
    with Sandbox(LIMITS, engine=engine) as sandbox:
        harmless(sandbox, program, virtual=("new mount namespace", "new user namespace"))


def signals(engine: str) -> None:
    program = """
import signal
victim, owner = map(int, sys.argv[1:])
for number in (victim, owner):
    attempt(f"signal process {number}", lambda: os.kill(number, signal.SIGKILL))
    attempt(f"signal group {number}", lambda: os.killpg(number, signal.SIGKILL))
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV):
    try:
        os.kill(1, number)
    except OSError:
        pass
"""
    victim = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        with Sandbox(LIMITS, engine=engine) as sandbox:
            harmless(sandbox, program, str(victim.pid), str(os.getpid()))
            everyone = "import os\nassert os.getppid() == 1\nfor s in (15, 19, 9): os.kill(-1, s)"
            python(sandbox, everyone)
            still_works(sandbox)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def environment(engine: str) -> None:
    program = """
import glob
def find(paths):
    found = [path for path in paths if b"secret-of-the-owner" in readable(path)]
    if not found:
        raise OSError
    return found
def readable(path):
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError:
        return b""
attempt("own environment", lambda: find(["/proc/self/environ"]))
attempt("environments and arguments", lambda: find(glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline")))
attempt("open files", lambda: find(f"/proc/self/fd/{n}" for n in range(3, 100)))
attempt("variable", lambda: os.environ["WEFT_ATTACK"])
attempt("more open files", lambda: [n for n in range(3, 100) if os.path.exists(f"/proc/self/fd/{n}")][0])
for name in ("/etc/passwd", "/etc/shadow", "/root/.ssh", "/home", "/var", "/sys", "/etc/hostname"):
    attempt(f"see {name}", lambda: os.listdir(name) if os.path.isdir(name) else read(name))
"""
    inherited, end = os.pipe()
    os.set_inheritable(inherited, True)
    os.write(end, b"secret-of-the-owner")
    os.environ["WEFT_ATTACK"] = "secret-of-the-owner"
    try:
        with Sandbox(LIMITS, engine=engine) as sandbox:
            harmless(sandbox, program, virtual=("see /sys",))
    finally:
        del os.environ["WEFT_ATTACK"]
        os.close(inherited)
        os.close(end)


def disk(engine: str) -> None:
    full = "import os\nwith open({!r}, 'wb') as f:\n    for _ in range(10_000): f.write(bytes(1 << 20))"
    many = "import os\nfor n in range(200_000): os.mkdir(str(n))"
    before = shutil.disk_usage(tempfile.gettempdir()).free
    # gVisor does not count files; it keeps them in its own memory, and CPU time bounds their number.
    programs = [full.format("big"), full.format("/dev/shm/big"), *([] if engine == "gvisor" else [many])]
    for program in programs:
        with Sandbox(LIMITS, engine=engine) as sandbox:
            result = python(sandbox, program)
            assert result.ending is ProgramEnding.DISK_FULL, result
    for folder in ("/", "/dev", "/var/tmp", "/run"):
        with Sandbox(LIMITS, engine=engine) as sandbox:
            assert python(sandbox, full.format(f"{folder}/big")).exit_code == 1
    used = before - shutil.disk_usage(tempfile.gettempdir()).free
    assert used < 2 << 30, f"{used:,} bytes of the machine's disk"


def clock(engine: str) -> None:
    limits = Limits(cpu_s=0.5, wall_s=PATIENCE_S, disk_bytes=8 << 20)
    with Sandbox(limits, engine=engine) as sandbox:
        assert python(sandbox, "while True: pass").ending is ProgramEnding.OUT_OF_CPU_TIME
        busy = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
        assert python(sandbox, busy).ending is ProgramEnding.OUT_OF_CPU_TIME
        ignoring = "import signal, time\nfor n in (1, 2, 15, 24): signal.signal(n, signal.SIG_IGN)\ntime.sleep(600)"
        started_s = time.monotonic()
        result = sandbox.run(["python", "-I", "-S", "-c", ignoring], wall_s=0.5)
        assert result.ending is ProgramEnding.TIMED_OUT
        daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)"
        assert python(sandbox, daemon).succeeded
        left = sandbox.run(["sh", "-c", "ls -d /proc/[0-9]*"]).stdout.split()
        assert len(left) <= 3, left  # process 1, the shell and ls
        assert time.monotonic() - started_s < 300


def devices(engine: str) -> None:
    program = """
import fcntl
known = {"null", "zero", "full", "random", "urandom", "fd", "shm", "stdin", "stdout", "stderr", "tty", "pts", "ptmx"}
attempt("other devices", lambda: [n for n in os.listdir("/dev") if n not in known] or os.close(-1))
for kind, name in ((stat.S_IFBLK, "block"), (stat.S_IFCHR, "memory")):
    attempt(f"make {name}", lambda: os.mknod(f"/tmp/{name}", kind | 0o600, os.makedev(1, 1)))
for name in ("mem", "kmsg", "vda", "sda", "kvm", "fuse", "net/tun", "tty", "console", "nvidiactl"):
    attempt(f"open {name}", lambda: os.open(f"/dev/{name}", os.O_RDONLY))
attempt("type into a terminal", lambda: fcntl.ioctl(0, 0x5412, b"x"))
"""
    with Sandbox(LIMITS, engine=engine) as sandbox:
        virtual = ("other devices", "make block", "make memory", "open fuse", "open net/tun")
        harmless(sandbox, program, virtual=virtual)
        assert python(
            sandbox, "open('/dev/null', 'w').write('x'); open('/dev/urandom', 'rb').read(8)"
        ).succeeded


ATTACKS: dict[str, Callable[[str], None]] = {
    "fork bomb": fork_bomb,
    "10 GB of output": ten_gigabytes_of_output,
    "/proc": proc,
    "ptrace": ptrace,
    "symlinks": symlinks,
    "sockets": sockets,
    "mounts": mounts,
    "signals to the parent": signals,
    "environment secrets": environment,
    "disk": disk,
    "time": clock,
    "devices": devices,
}


def contained(engine: str) -> Iterator[tuple[str, AssertionError | None]]:
    """Run all attacks. Yields each one's name, and the error of one that succeeded."""
    for name, attack in ATTACKS.items():
        try:
            attack(engine)
        except AssertionError as error:
            yield name, error
        else:
            yield name, None


if __name__ == "__main__":
    for name, error in contained(sys.argv[1]):
        print(f"{name}: {error or 'contained'}", flush=True)
