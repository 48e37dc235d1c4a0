"""Write the version and the SHA-256 of an sdist into the recipes.

python packaging/checksums.py dist/pmm3d-0.1.0.tar.gz
"""

import hashlib
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
VERSION = r"\d+\.\d+\.\d+(?:[a-z]+\d+)?"
BEFORE_IT = r"""(?m)^(\s*version(?:: |\(| = )['"]|    pypi = "pmm3d/pmm3d-)"""


def update(sdist: Path, folder: Path = HERE) -> None:
    """Replace the version and the last checksum of each recipe in folder, and rename the EasyBuild file."""
    version = re.fullmatch(rf"pmm3d-({VERSION})\.tar\.gz", sdist.name)
    if version is None:
        sys.exit(f"{sdist} is not an sdist of pmm3d: its name must be pmm3d-X.Y.Z.tar.gz")
    checksum = hashlib.sha256(sdist.read_bytes()).hexdigest()
    [easyconfig] = (folder / "easybuild").glob("pmm3d-*.eb")
    renamed = easyconfig.with_name(re.sub(rf"-{VERSION}-", f"-{version[1]}-", easyconfig.name))
    easyconfig.rename(renamed)
    spack = folder / "spack" / "packages" / "py_pmm3d" / "package.py"
    for recipe in (folder / "conda" / "recipe.yaml", spack, renamed):
        text = re.sub(rf"{BEFORE_IT}{VERSION}", rf"\g<1>{version[1]}", recipe.read_text())
        recipe.write_text(re.sub(r"(.*\b)[0-9a-f]{64}\b", rf"\g<1>{checksum}", text, count=1, flags=re.S))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    update(Path(sys.argv[1]))
