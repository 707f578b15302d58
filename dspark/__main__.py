"""`python -m dspark`, the same as `dspark`; `accelerate launch -m dspark train` starts several processes."""

import sys

from dspark import main


sys.exit(main())
