"""Write dist/sbom.json: a list of all that the locks pin, in CycloneDX 1.6 (https://cyclonedx.org), for a release."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from locked import pins

ROOT = Path(__file__).resolve().parent.parent


def sbom() -> dict[str, Any]:
    """The list; it names no time, so that the same locks give the same file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    components = [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{pin.name}@{pin.version}",
            "purl": f"pkg:pypi/{pin.name}@{pin.version}",
            "name": pin.name,
            "version": pin.version,
            # One of them is the file that was installed; which, depends on the machine.
            "externalReferences": [
                {
                    "type": "distribution",
                    "url": f"pkg:pypi/{pin.name}@{pin.version}",
                    "hashes": [{"alg": "SHA-256", "content": each} for each in pin.hashes],
                }
            ],
        }
        for pin in pins()
    ]
    data = {
        "type": "data",
        "bom-ref": "fashion-mnist-subset",
        "name": "Fashion-MNIST, a subset of 12,000 images",
        "licenses": [{"license": {"id": "MIT"}}],
    }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "purl": own,
                "name": project["name"],
                "version": project["version"],
                "licenses": [{"license": {"id": project["license"].split(" AND ")[0]}}],
            }
        },
        "components": [*components, data],
        "dependencies": [{"ref": own, "dependsOn": [each["bom-ref"] for each in (*components, data)]}],
    }


if __name__ == "__main__":
    target = ROOT / "dist" / "sbom.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(sbom(), indent=2) + "\n")
    print(target)
