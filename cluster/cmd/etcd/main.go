// Command etcd is the etcd server. Its own main package is a separate Go module that the module
// proxy does not serve, so the server package is started here.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() {
	etcdmain.Main(os.Args)
}
