"""Ask pip-audit for known holes of what the locks pin; what it could not ask about is told, and is no good news.

pip-audit counts a package whose advisories it cannot reach as one without any; here it is an error.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from locked import pins


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        asked, told = Path(folder) / "pins.txt", Path(folder) / "told.json"
        asked.write_text("".join(f"{pin.name}=={pin.version}\n" for pin in pins()))
        command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner", "off"]
        command += ["--requirement", str(asked), "--format", "json", "--output", str(told)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
        if not told.exists():
            print(f"error: pip-audit gave no report: {done.stderr.strip()}", file=sys.stderr)
            return 2
        packages = json.loads(told.read_text())["dependencies"]
    skipped = [each["name"] for each in packages if "skip_reason" in each]
    holes = [(each["name"], each["version"], hole) for each in packages for hole in each.get("vulns", [])]
    for name, version, hole in holes:
        print(f"{name} {version}: {hole['id']}, mended in {', '.join(hole['fix_versions']) or 'no version yet'}")
    print(f"{len(packages) - len(skipped)} of {len(packages)} packages were asked about, {len(holes)} holes are known")
    if skipped:
        print("error: the source of advisories cannot be reached; SECURITY.md has what was looked up by hand")
    return int(bool(holes or skipped))


if __name__ == "__main__":
    sys.exit(main())
